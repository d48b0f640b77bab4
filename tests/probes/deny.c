#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif

/* deny look-ups|cookies PROGRAM ARGS...: runs a program as on a kernel without INET_DIAG, or without SO_NETNS_COOKIE
   (before Linux 5.14). Exits with 77 where system calls cannot be filtered. */

#define ARGUMENT(index) ((unsigned)(offsetof(struct seccomp_data, args) + 8 * (index)))
#define LOAD(at) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at)
#define UNLESS_EQUAL(value, steps) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, steps)

int main(int count, char **arguments) {
    if (count < 3) {
        return 2;
    }
    int denies_look_ups = strcmp(arguments[1], "look-ups") == 0;
    unsigned call = denies_look_ups ? SYS_socket : SYS_getsockopt;
    unsigned argument = denies_look_ups ? 0 : 2, value = denies_look_ups ? AF_NETLINK : SO_NETNS_COOKIE;
    int error = denies_look_ups ? EAFNOSUPPORT : ENOPROTOOPT;
    struct sock_filter steps[] = {
        LOAD(offsetof(struct seccomp_data, nr)),
        UNLESS_EQUAL(call, 3),
        LOAD(ARGUMENT(argument)),
        UNLESS_EQUAL(value, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof steps / sizeof *steps, steps};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0) {
        perror("seccomp");
        return 77;
    }
    execvp(arguments[2], arguments + 2);
    perror(arguments[2]);
    return 127;
}
