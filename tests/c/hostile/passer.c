/* A hostile client: passes descriptors on the lifelines of its connections, past the library.
 *
 * Usage: passer PORT nulls|linger [COUNT]
 *
 * "nulls" passes twelve descriptors with one message on each of COUNT connections, and closes them. "linger" passes, on
 * one connection for each kind of message, a TCP socket with unsent data and SO_LINGER whose last holder the server
 * becomes, and keeps the connections. Then prints "passed".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LINGER_S = 60, DESCRIPTORS = 12, KINDS = 5 };

/* A system call that the library does not see. */
static long kernel(long number, long first, long second, long third, long fourth, long fifth, long sixth)
{
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = fourth;
    register long r8 __asm__("r8") = fifth;
    register long r9 __asm__("r9") = sixth;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(first), "S"(second), "d"(third), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = first;
    register long x1 __asm__("x1") = second;
    register long x2 __asm__("x2") = third;
    register long x3 __asm__("x3") = fourth;
    register long x4 __asm__("x4") = fifth;
    register long x5 __asm__("x5") = sixth;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "the system calls of this architecture"
#endif
}

static void must(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        exit(1);
    }
}

static int connect_to(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(fd, (struct sockaddr *)&at, sizeof at) == 0, "connect");
    return fd;
}

/* Requests and responses; a connection has lanes after a few. */
static void exchange(int fd, int count)
{
    char byte = 'x';
    while (count-- > 0)
        must(send(fd, &byte, 1, MSG_NOSIGNAL) == 1 && recv(fd, &byte, 1, 0) == 1, "exchange");
}

static void pass(int lifeline, char kind, const int *fds, size_t count)
{
    char room[CMSG_SPACE(DESCRIPTORS * sizeof(int))];
    memset(room, 0, sizeof room);
    struct iovec bytes = {&kind, 1};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = room, .msg_controllen = CMSG_SPACE(count * sizeof(int))};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(count * sizeof(int));
    memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    kernel(SYS_sendmsg, lifeline, (long)&message, MSG_NOSIGNAL | MSG_DONTWAIT, 0, 0, 0);
}

/* A TCP socket of the kernel whose peer never reads, with unsent data. */
static int lingering(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof at;
    static char data[1 << 16];
    struct linger linger = {1, LINGER_S};
    int listener = (int)kernel(SYS_socket, AF_INET, SOCK_STREAM, 0, 0, 0, 0);
    int fd = (int)kernel(SYS_socket, AF_INET, SOCK_STREAM, 0, 0, 0, 0);
    kernel(SYS_bind, listener, (long)&at, size, 0, 0, 0);
    kernel(SYS_listen, listener, 1, 0, 0, 0, 0);
    kernel(SYS_getsockname, listener, (long)&at, (long)&size, 0, 0, 0);
    must(kernel(SYS_connect, fd, (long)&at, size, 0, 0, 0) == 0, "a connection of the kernel");
    kernel(SYS_setsockopt, fd, SOL_SOCKET, SO_LINGER, (long)&linger, sizeof linger, 0);
    while (kernel(SYS_sendto, fd, (long)data, sizeof data, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0) > 0)
        ;
    return fd;
}

int main(int argc, char **argv)
{
    must(argc > 2, "arguments");
    int port = atoi(argv[1]);
    if (strcmp(argv[2], "nulls") == 0) {
        int fds[DESCRIPTORS];
        for (int i = 0; i < DESCRIPTORS; i++)
            must((fds[i] = open("/dev/null", O_RDONLY)) >= 0, "/dev/null");
        for (int i = 0, count = argc > 3 ? atoi(argv[3]) : 1; i < count; i++) {
            int fd = connect_to(port);
            exchange(fd, i % 3 * 2);
            pass(fd, (char)(1 + i % KINDS), fds, DESCRIPTORS);
            usleep(2000);
            close(fd);
        }
    } else {
        /* With and without lanes; kind 1 is the byte of a wake-up, 2 to 4 are messages. */
        for (int i = 0; i < 2 * KINDS; i++) {
            int fd = connect_to(port), stuck = lingering();
            exchange(fd, i < KINDS ? 1 : 6);
            pass(fd, (char)(1 + i % KINDS), &stuck, 1);
            kernel(SYS_close, stuck, 0, 0, 0, 0, 0);
        }
    }
    puts("passed");
    fflush(stdout);
    pause();
    return 0;
}
