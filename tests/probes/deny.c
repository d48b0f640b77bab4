#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SO_NETNS_COOKIE
#define SO_NETNS_COOKIE 71
#endif

/* deny look-ups|cookies|memory PROGRAM ARGS...: runs a program as on a kernel without INET_DIAG, as on one without
   SO_NETNS_COOKIE (before Linux 5.14), or where a process cannot map the memory of another one. Exits with 77 where
   system calls cannot be filtered. */

/* A call is denied if one of its arguments is in a range, and so is another one. */
struct condition {
    unsigned argument, least, most;
};

static const struct condition ALWAYS = {0, 0, UINT_MAX};

struct denial {
    const char *name;
    unsigned call;
    struct condition conditions[2];
    int error;
};

#define LOAD(at) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, at)
#define UNLESS_EQUAL(value, steps) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, steps)
#define UNLESS(condition, steps)                                                      \
    LOAD((unsigned)(offsetof(struct seccomp_data, args) + 8 * (condition).argument)), \
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, (condition).least, 0, (steps) + 1),       \
        BPF_JUMP(BPF_JMP | BPF_JGT | BPF_K, (condition).most, steps, 0)

int main(int count, char **arguments) {
    const struct denial denials[] = {
        {"look-ups", SYS_socket, {{0, AF_NETLINK, AF_NETLINK}, ALWAYS}, EAFNOSUPPORT},
        {"cookies", SYS_getsockopt, {{2, SO_NETNS_COOKIE, SO_NETNS_COOKIE}, ALWAYS}, ENOPROTOOPT},
        /* What a program reads of another one is mapped without access first; no library is that large. */
        {"memory", SYS_mprotect, {{2, PROT_READ, PROT_READ}, {1, 4 << 20, UINT_MAX}}, ENOMEM},
    };
    const struct denial *denial = denials, *end = denials + sizeof denials / sizeof *denials;
    while (denial < end && (count < 3 || strcmp(arguments[1], denial->name) != 0)) {
        denial++;
    }
    if (denial == end) {
        return 2;
    }
    struct sock_filter steps[] = {
        LOAD(offsetof(struct seccomp_data, nr)),
        UNLESS_EQUAL(denial->call, 7),
        UNLESS(denial->conditions[0], 4),
        UNLESS(denial->conditions[1], 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)denial->error),
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
