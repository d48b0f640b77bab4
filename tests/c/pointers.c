// Bad addresses in the arguments of every function that the library replaces and that takes a pointer: EFAULT, whether
// the descriptor is accelerated or not. The bytes of a connection are copied by loads and stores, so that its buffers
// are not here (`bad_addresses_are_efault`). Left out are arguments that the C library itself reads or writes:
// time-outs of select and ppoll, modes and formats of streams, signal actions.
#include "check.h"

#include <sched.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/syscall.h>

#define PAGE_BYTES 4096

// Memory that cannot be accessed, and memory that cannot be written. Each check has new pages.
static void *nowhere, *constant;

static void map_pages(void)
{
    nowhere = mmap(NULL, PAGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    constant = mmap(NULL, PAGE_BYTES, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(nowhere != MAP_FAILED && constant != MAP_FAILED);
}

// Fails the check unless the call is EFAULT in a child.
#define EFAULTS(call)                                                                              \
    do {                                                                                           \
        pid_t child_ = fork();                                                                     \
        if (child_ == 0) {                                                                         \
            errno = 0;                                                                             \
            long got_ = (long)(call);                                                              \
            _exit(got_ == -1 ? errno : 200);                                                       \
        }                                                                                          \
        int status_;                                                                               \
        CHECK_EQ(waitpid(child_, &status_, 0), child_);                                            \
        if (WIFSIGNALED(status_))                                                                  \
            FAIL("%s: killed by signal %d", #call, WTERMSIG(status_));                             \
        if (WEXITSTATUS(status_) == 200)                                                           \
            FAIL("%s succeeded", #call);                                                           \
        if (WEXITSTATUS(status_) != EFAULT)                                                        \
            FAIL("%s failed with %s", #call, strerrorname_np(WEXITSTATUS(status_)));               \
    } while (0)

// Calls that wait for a descriptor that is readable.
static void check_waits(int fd)
{
    int set = OK(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    struct timespec no_time = {0};
    sigset_t mask;
    sigemptyset(&mask);
    EFAULTS(poll(nowhere, 1, 0));
    EFAULTS(poll(NULL, 1, 0));
    EFAULTS(ppoll(nowhere, 1, &no_time, NULL));
    EFAULTS(select(fd + 1, nowhere, NULL, NULL, NULL));
    EFAULTS(select(fd + 1, NULL, nowhere, NULL, NULL));
    EFAULTS(select(fd + 1, NULL, NULL, nowhere, NULL));
    EFAULTS(pselect(fd + 1, nowhere, NULL, NULL, &no_time, &mask));
#ifdef SYS_poll
    EFAULTS(syscall(SYS_poll, nowhere, 1, 0));
#endif
    EFAULTS(syscall(SYS_ppoll, nowhere, 1, NULL, NULL, 8));
#ifdef SYS_select
    EFAULTS(syscall(SYS_select, fd + 1, nowhere, NULL, NULL, NULL));
#endif
    EFAULTS(syscall(SYS_pselect6, fd + 1, nowhere, NULL, NULL, NULL, NULL));
    EFAULTS(epoll_ctl(set, EPOLL_CTL_ADD, fd, nowhere));
    OK(epoll_ctl(set, EPOLL_CTL_ADD, fd, &event));
    EFAULTS(epoll_ctl(set, EPOLL_CTL_MOD, fd, nowhere));
    EFAULTS(epoll_wait(set, nowhere, 1, 0));
    EFAULTS(epoll_wait(set, constant, 1, 0));
    EFAULTS(epoll_pwait(set, nowhere, 1, 0, NULL));
    EFAULTS(epoll_pwait2(set, nowhere, 1, &no_time, NULL));
    OK(close(set));
}

// Vectors of a descriptor that is readable, or writable.
static void check_vectors(int readable, int writable)
{
    EFAULTS(readv(readable, nowhere, 1));
    EFAULTS(preadv2(readable, nowhere, 1, -1, 0));
    EFAULTS(writev(writable, nowhere, 1));
    EFAULTS(pwritev2(writable, nowhere, 1, -1, 0));
}

// Buffers of a descriptor that is not accelerated.
static void check_buffers(int readable, int writable)
{
    struct iovec bad = {nowhere, 1};
    EFAULTS(read(readable, nowhere, 1));
    EFAULTS(write(writable, nowhere, 1));
    EFAULTS(readv(readable, &bad, 1));
    EFAULTS(writev(writable, &bad, 1));
}

// Messages of a connected socket that is readable and writable.
static void check_messages(int fd)
{
    char byte;
    struct iovec one = {&byte, 1};
    struct msghdr bad_vector = {.msg_iov = nowhere, .msg_iovlen = 1};
    struct mmsghdr bad_vectors = {.msg_hdr = bad_vector};
    struct msghdr *unwritable = constant;
    struct sockaddr_storage name;
    OK(mprotect(constant, PAGE_BYTES, PROT_READ | PROT_WRITE));
    *unwritable = (struct msghdr){.msg_iov = &one, .msg_iovlen = 1};
    OK(mprotect(constant, PAGE_BYTES, PROT_READ));
    EFAULTS(sendmsg(fd, nowhere, 0));
    EFAULTS(sendmsg(fd, NULL, 0));
    EFAULTS(sendmsg(fd, &bad_vector, 0));
    EFAULTS(sendmmsg(fd, nowhere, 1, 0));
    EFAULTS(sendmmsg(fd, &bad_vectors, 1, 0));
    EFAULTS(recvmsg(fd, nowhere, MSG_DONTWAIT));
    EFAULTS(recvmsg(fd, NULL, MSG_DONTWAIT));
    EFAULTS(recvmsg(fd, &bad_vector, MSG_DONTWAIT));
    EFAULTS(recvmsg(fd, unwritable, MSG_DONTWAIT));
    EFAULTS(recvmmsg(fd, nowhere, 1, MSG_DONTWAIT, NULL));
    EFAULTS(recvmmsg(fd, &bad_vectors, 1, MSG_DONTWAIT, NULL));
    EFAULTS(recvfrom(fd, &byte, 1, MSG_DONTWAIT, (struct sockaddr *)&name, nowhere));
}

// Names and options of a connected socket.
static void check_setup(int fd, int level, int option)
{
    struct sockaddr_storage name;
    socklen_t size = sizeof name, four = 4;
    int value;
    EFAULTS(getsockname(fd, nowhere, &size));
    EFAULTS(getsockname(fd, (struct sockaddr *)&name, nowhere));
    EFAULTS(getsockname(fd, constant, &size));
    EFAULTS(getpeername(fd, nowhere, &size));
    EFAULTS(getpeername(fd, (struct sockaddr *)&name, nowhere));
    EFAULTS(getsockopt(fd, SOL_SOCKET, SO_TYPE, nowhere, &four));
    EFAULTS(getsockopt(fd, SOL_SOCKET, SO_ERROR, nowhere, &four));
    EFAULTS(getsockopt(fd, SOL_SOCKET, SO_SNDBUF, constant, &four));
    EFAULTS(getsockopt(fd, SOL_SOCKET, SO_TYPE, &value, nowhere));
    EFAULTS(setsockopt(fd, SOL_SOCKET, SO_SNDBUF, nowhere, 4));
    EFAULTS(setsockopt(fd, level, option, nowhere, 4));
    EFAULTS(ioctl(fd, FIONREAD, nowhere));
    EFAULTS(ioctl(fd, FIONBIO, nowhere));
    EFAULTS(connect(fd, nowhere, sizeof(struct sockaddr_in)));
}

TEST(bad_pointers_of_pipes_are_efault)
{
    int ends[2];
    map_pages();
    OK(pipe(ends));
    CHECK_EQ(write(ends[1], "x", 1), 1);
    check_waits(ends[0]);
    check_vectors(ends[0], ends[1]);
    check_buffers(ends[0], ends[1]);
    EFAULTS(splice(ends[0], nowhere, ends[1], NULL, 1, 0) == -1 && errno == ESPIPE ? (errno = EFAULT, -1) : 0);
    EFAULTS(ioctl(ends[0], FIONREAD, nowhere));
}

TEST(bad_pointers_of_datagram_sockets_are_efault)
{
    map_pages();
    struct address at = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_DGRAM, 0));
    OK(bind(fd, ADDRESS(&at), at.size));
    at = name_of(fd);
    OK(connect(fd, ADDRESS(&at), at.size));
    for (int index = 0; index < 40; index++)
        CHECK_EQ(send(fd, "x", 1, 0), 1);
    check_waits(fd);
    check_vectors(fd, fd);
    check_buffers(fd, fd);
    check_messages(fd);
    check_setup(fd, SOL_SOCKET, SO_BROADCAST);
    EFAULTS(sendto(fd, "x", 1, 0, nowhere, at.size));
    EFAULTS(bind(fd, nowhere, at.size));
}

TEST(bad_pointers_of_unix_sockets_with_control_messages_are_efault)
{
    int pair[2];
    char byte = 'x';
    map_pages();
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    struct iovec one = {&byte, 1};
    struct msghdr message = {.msg_iov = &one, .msg_iovlen = 1, .msg_control = nowhere, .msg_controllen = 64};
    struct mmsghdr messages = {.msg_hdr = message};
    EFAULTS(sendmsg(pair[0], &message, 0));
    EFAULTS(sendmmsg(pair[0], &messages, 1, 0));
    CHECK_EQ(send(pair[0], "xyz", 3, 0), 3);
    check_waits(pair[1]);
    check_vectors(pair[1], pair[0]);
    // Without descriptors in the message, nothing is written there.
    CHECK_EQ(recvmsg(pair[1], &message, MSG_PEEK), 1);
}

TEST(bad_pointers_of_sockets_that_are_not_connected_are_efault)
{
    map_pages();
    struct address at = ip4("127.0.0.1", 0);
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0)), one = 1;
    EFAULTS(bind(fd, nowhere, at.size));
    EFAULTS(connect(fd, nowhere, at.size));
    EFAULTS(connect(fd, (struct sockaddr *)((char *)nowhere - 8), at.size));
    EFAULTS(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, nowhere, sizeof one));
    EFAULTS(sendto(fd, "x", 1, MSG_FASTOPEN, nowhere, at.size));
    EFAULTS(sendmsg(fd, nowhere, MSG_FASTOPEN));
    check_waits(fd);
}

TEST(bad_pointers_of_listeners_are_efault)
{
    map_pages();
    struct address at;
    socklen_t size = sizeof(struct sockaddr_in);
    int listener = listen_anywhere(&at);
    int clients[4];
    for (int index = 0; index < 4; index++)
        clients[index] = dial(&at);
    check_waits(listener);
    EFAULTS(accept(listener, nowhere, &size));
    EFAULTS(accept4(listener, nowhere, &size, SOCK_CLOEXEC));
    EFAULTS(accept(listener, ADDRESS(&at), nowhere));
    EFAULTS(getsockname(listener, nowhere, &size));
    EFAULTS(getsockopt(listener, SOL_SOCKET, SO_ACCEPTCONN, nowhere, &size));
    EFAULTS(setsockopt(listener, SOL_SOCKET, SO_SNDBUF, nowhere, 4));
    EFAULTS(setsockopt(listener, IPPROTO_IP, IP_MINTTL, nowhere, 4));
    EFAULTS(ioctl(listener, FIONBIO, nowhere));
    for (int index = 0; index < 4; index++)
        OK(close(clients[index]));
}

TEST(bad_pointers_of_connections_are_efault)
{
    struct pair pair = connected_pair();
    char bytes[64] = {0};
    int file = OK(open("/proc/self/exe", O_RDONLY));
    map_pages();
    send_all(pair.server, bytes, sizeof bytes);
    check_waits(pair.client);
    check_vectors(pair.client, pair.client);
    check_messages(pair.client);
    check_setup(pair.client, IPPROTO_TCP, TCP_NODELAY);
    EFAULTS(sendfile(pair.client, file, nowhere, 1));
}

// The program that a child would run does not matter: the address of its name or of its environment is bad.
TEST(bad_pointers_of_new_programs_are_efault)
{
    map_pages();
    struct address at;
    char *const arguments[] = {"true", NULL}, *const bad_strings[] = {nowhere, NULL};
    int listener = listen_anywhere(&at), program = OK(open("/bin/true", O_RDONLY));
    EFAULTS(execve(nowhere, arguments, environ));
    EFAULTS(execv(nowhere, arguments));
    EFAULTS(execve("/bin/true", nowhere, environ));
    EFAULTS(execve("/bin/true", arguments, nowhere));
    EFAULTS(execve("/bin/true", arguments, bad_strings));
    EFAULTS(execveat(AT_FDCWD, nowhere, arguments, environ, 0));
    EFAULTS(fexecve(program, arguments, nowhere));
    EFAULTS(posix_spawn(&(pid_t){0}, nowhere, NULL, NULL, arguments, environ) == EFAULT ? (errno = EFAULT, -1) : 0);
    OK(close(listener));
}
