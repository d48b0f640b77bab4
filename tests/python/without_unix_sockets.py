"""Runs a program that may not make AF_UNIX sockets: socket() fails with EAFNOSUPPORT, as under systemd's
RestrictAddressFamilies=."""

import ctypes
import os
import struct
import sys

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
SYS_SOCKET, AF_UNIX, EAFNOSUPPORT = 41, 1, 97
ALLOW, ERROR = 0x7FFF0000, 0x00050000
NUMBER_AT, FIRST_ARGUMENT_AT = 0, 16
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

steps = [
    (LOAD, 0, 0, NUMBER_AT),
    (EQUAL, 0, 3, SYS_SOCKET),
    (LOAD, 0, 0, FIRST_ARGUMENT_AT),
    (EQUAL, 0, 1, AF_UNIX),
    (RETURN, 0, 0, ERROR | EAFNOSUPPORT),
    (RETURN, 0, 0, ALLOW),
]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
zero = ctypes.c_ulong(0)
for arguments in (
    (PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero),
    (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), program, zero, zero),
):
    if libc.prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
os.execvp(sys.argv[1], sys.argv[1:])
