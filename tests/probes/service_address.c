#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* service_address CGROUP SERVICE PORT REAL PORT PROGRAM ARGS...: runs a program in a control group whose connections to
   a service address reach another one, and which shows the service address as their peer, as Cilium does. Exits with
   77 where BPF programs cannot be used. */

#define STORE(offset, value) {.code = BPF_ST | BPF_MEM | BPF_W, .dst_reg = 1, .off = (offset), .imm = (int)(value)}
#define LOAD(to, offset) {.code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = (to), .src_reg = 1, .off = (offset)}

static void give_up(const char *what) {
    perror(what);
    exit(77);
}

/* A program that replaces one address and port in the context of a call (struct bpf_sock_addr: user_ip4 at 4, user_port
   at 24), and permits the call. */
static int load(int type, unsigned from_ip, unsigned from_port, unsigned to_ip, unsigned to_port) {
    struct bpf_insn program[] = {
        LOAD(2, 4),
        {.code = BPF_JMP32 | BPF_JNE | BPF_K, .dst_reg = 2, .off = 4, .imm = (int)from_ip},
        LOAD(2, 24),
        {.code = BPF_JMP32 | BPF_JNE | BPF_K, .dst_reg = 2, .off = 2, .imm = (int)from_port},
        STORE(4, to_ip),
        STORE(24, to_port),
        {.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 1},
        {.code = BPF_JMP | BPF_EXIT},
    };
    union bpf_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.prog_type = BPF_PROG_TYPE_CGROUP_SOCK_ADDR;
    attributes.expected_attach_type = type;
    attributes.insn_cnt = sizeof program / sizeof *program;
    attributes.insns = (unsigned long)program;
    attributes.license = (unsigned long)"GPL";
    int fd = syscall(SYS_bpf, BPF_PROG_LOAD, &attributes, sizeof attributes);
    if (fd < 0)
        give_up("loading a BPF program");
    return fd;
}

static void attach(int group, int program, int type) {
    union bpf_attr attributes;
    memset(&attributes, 0, sizeof attributes);
    attributes.target_fd = group;
    attributes.attach_bpf_fd = program;
    attributes.attach_type = type;
    if (syscall(SYS_bpf, BPF_PROG_ATTACH, &attributes, sizeof attributes))
        give_up("attaching a BPF program");
}

int main(int count, char **words) {
    if (count < 7)
        return 2;
    unsigned service = inet_addr(words[2]), port = htons(atoi(words[3]));
    unsigned real = inet_addr(words[4]), real_port = htons(atoi(words[5]));
    int group = open(words[1], O_RDONLY | O_DIRECTORY);
    if (group < 0)
        give_up(words[1]);
    attach(group, load(BPF_CGROUP_INET4_CONNECT, service, port, real, real_port), BPF_CGROUP_INET4_CONNECT);
    attach(group, load(BPF_CGROUP_INET4_GETPEERNAME, real, real_port, service, port), BPF_CGROUP_INET4_GETPEERNAME);
    int procs = openat(group, "cgroup.procs", O_WRONLY);
    if (procs < 0 || write(procs, "0", 1) != 1)
        give_up("cgroup.procs");
    close(procs);
    close(group);
    execvp(words[6], words + 6);
    give_up(words[6]);
}
