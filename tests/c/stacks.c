// Threads with the smallest stack that POSIX promises (PTHREAD_STACK_MIN), and handlers on an alternate signal stack of
// the usual size, may make every call.
#include "check.h"

#include <limits.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>

enum { ROUNDS = 100, BYTES = 1000, BULK_BYTES = 4 << 20, MANY = 100, STAIN = 0xa5 };

// Static, because the stacks have no room for them. Each role has its own.
static char buffers[2][65536];
static struct address server_address;
static int listener;
static int unix_pair[2];

struct role {
    void (*run)(char *buffer);
    int index;
};

static void *run_role(void *argument)
{
    const struct role *role = argument;
    role->run(buffers[role->index]);
    return NULL;
}

struct small_thread {
    pthread_t thread;
    unsigned char *stack;
    size_t size;
    struct role role;
};

// Starts a thread on a stack of PTHREAD_STACK_MIN, with an inaccessible page below it.
static void start_small(struct small_thread *small, void (*run)(char *buffer), int index)
{
    size_t page = sysconf(_SC_PAGESIZE);
    small->size = PTHREAD_STACK_MIN;
    unsigned char *memory = mmap(NULL, page + small->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    small->stack = memory + page;
    CHECK_EQ(mprotect(small->stack, small->size, PROT_READ | PROT_WRITE), 0);
    memset(small->stack, STAIN, small->size);
    small->role = (struct role){run, index};
    pthread_attr_t attributes;
    CHECK_EQ(pthread_attr_init(&attributes), 0);
    CHECK_EQ(pthread_attr_setstack(&attributes, small->stack, small->size), 0);
    CHECK_EQ(pthread_create(&small->thread, &attributes, run_role, &small->role), 0);
}

static void join_small(struct small_thread *small, const char *name)
{
    join_thread(small->thread);
    size_t untouched = 0;
    while (untouched < small->size && small->stack[untouched] == STAIN)
        untouched++;
    info("%s used %zu of the %zu bytes of its stack", name, small->size - untouched, small->size);
}

static void run_both(void (*server)(char *buffer), void (*client)(char *buffer))
{
    listener = listen_anywhere(&server_address);
    OK(socketpair(AF_UNIX, SOCK_STREAM, 0, unix_pair));
    struct small_thread threads[2];
    start_small(&threads[0], server, 0);
    start_small(&threads[1], client, 1);
    join_small(&threads[0], "the server");
    join_small(&threads[1], "the client");
}

static int client_socket(void)
{
    int fd = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(fd, ADDRESS(&server_address), server_address.size));
    return fd;
}

// Each round is a message there and one back: first over the path of a new connection, then over that of a busy one.
static void exchange(int fd, char *buffer, bool sends_first)
{
    for (int round = 0; round < ROUNDS; round++)
        for (int half = 0; half < 2; half++) {
            if (sends_first == (half == 0))
                send_all(fd, buffer, BYTES);
            else
                recv_exact(fd, buffer, BYTES);
        }
}

static void send_bulk(int fd, char *buffer)
{
    for (size_t sent = 0; sent < BULK_BYTES; sent += sizeof buffers[0])
        send_all(fd, buffer, sizeof buffers[0]);
}

static void recv_bulk(int fd, char *buffer)
{
    for (size_t got = 0; got < BULK_BYTES; got += sizeof buffers[0])
        recv_exact(fd, buffer, sizeof buffers[0]);
}

static void stream_server(char *buffer)
{
    int fd = OK(accept(listener, NULL, NULL));
    exchange(fd, buffer, false);
    recv_bulk(fd, buffer);
    send_bulk(fd, buffer);
    OK(shutdown(fd, SHUT_WR));
    CHECK_EQ(OK(read(fd, buffer, 1)), 0);
    OK(close(fd));
    OK(close(listener));
}

static void stream_client(char *buffer)
{
    int fd = client_socket();
    exchange(fd, buffer, true);
    send_bulk(fd, buffer);
    recv_bulk(fd, buffer);
    CHECK_EQ(OK(recv(fd, buffer, 1, 0)), 0);
    OK(close(fd));
}

TEST(the_smallest_stack_suffices_for_a_stream) { run_both(stream_server, stream_client); }

static void echo_server(char *buffer)
{
    int fd = OK(accept4(listener, NULL, NULL, SOCK_CLOEXEC));
    ssize_t got;
    while ((got = OK(recv(fd, buffer, sizeof buffers[0], 0))) > 0)
        send_all(fd, buffer, got);
    OK(close(fd));
}

static void messages(int fd, char *buffer)
{
    struct iovec parts[3] = {{buffer, 10}, {buffer + 10, 20}, {buffer + 30, 30}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    CHECK_EQ(OK(writev(fd, parts, 3)), 60);
    CHECK_EQ(OK(readv(fd, parts, 1)), 10);
    recv_exact(fd, buffer, 50);
    CHECK_EQ(OK(sendmsg(fd, &message, 0)), 60);
    CHECK_EQ(OK(recvmsg(fd, &message, MSG_WAITALL)), 60);
    struct mmsghdr many[2] = {{.msg_hdr = message}, {.msg_hdr = message}};
    CHECK_EQ(OK(sendmmsg(fd, many, 2, 0)), 2);
    recv_exact(fd, buffer, 119);
    CHECK_EQ(OK(recvmmsg(fd, many, 1, 0, NULL)), 1);
    CHECK_EQ(OK(sendto(fd, buffer, 9000, 0, NULL, 0)), 9000);
    CHECK_EQ(OK(recvfrom(fd, buffer, 1, MSG_PEEK, NULL, NULL)), 1);
    for (ssize_t left = 9000; left > 0;)
        left -= OK(recv(fd, NULL, left, MSG_TRUNC));
}

static void waits(int fd, char *buffer)
{
    static struct pollfd entries[MANY];
    for (int i = 0; i < MANY; i++)
        entries[i] = (struct pollfd){i == MANY / 2 ? fd : -1, POLLIN, 0};
    struct timespec soon = {0, 1000000};
    struct timeval soon_too = {0, 1000};
    fd_set set;
    FD_ZERO(&set);
    CHECK_EQ(OK(poll(entries + MANY / 2, 1, 1)), 0);
    CHECK_EQ(OK(poll(entries, MANY, 1)), 0);
    CHECK_EQ(OK(ppoll(entries, MANY, &soon, NULL)), 0);
    FD_SET(fd, &set);
    CHECK_EQ(OK(select(fd + 1, &set, NULL, NULL, &soon_too)), 0);
    send_all(fd, buffer, 1);
    FD_SET(fd, &set);
    CHECK_EQ(OK(pselect(fd + 1, &set, NULL, NULL, NULL, NULL)), 1);
    CHECK_EQ(OK(poll(entries, MANY, -1)), 1);
    int epoll = OK(epoll_create1(0));
    struct epoll_event event = {.events = EPOLLIN};
    epoll_add(epoll, fd, EPOLLIN | EPOLLOUT, 1);
    epoll_add(epoll, listener, EPOLLIN, 2);
    CHECK_EQ(OK(epoll_wait(epoll, &event, 1, -1)), 1);
    event.events = EPOLLIN | EPOLLET;
    OK(epoll_ctl(epoll, EPOLL_CTL_MOD, fd, &event));
    CHECK_EQ(OK(epoll_pwait(epoll, &event, 1, -1, NULL)), 1);
    recv_exact(fd, buffer, 1);
    CHECK_EQ(OK(epoll_wait(epoll, &event, 1, 5)), 0);
    OK(epoll_ctl(epoll, EPOLL_CTL_DEL, fd, NULL));
    OK(close(epoll));
}

static void files(int fd, char *buffer)
{
    int file = OK(memfd_create("stacks", 0)), pipes[2];
    OK(pipe(pipes));
    CHECK_EQ(OK(write(file, buffer, 20000)), 20000);
    off_t offset = 0;
    for (ssize_t left = 20000; left > 0;)
        left -= OK(sendfile(fd, file, &offset, left));
    for (ssize_t left = 20000; left > 0;)
        left -= OK(recv(fd, buffer, left, 0));
    CHECK_EQ(OK(write(pipes[1], buffer, 100)), 100);
    CHECK_EQ(OK(splice(pipes[0], NULL, fd, NULL, 100, 0)), 100);
    CHECK_EQ(OK(splice(fd, NULL, pipes[1], NULL, 100, 0)), 100);
    CHECK_EQ(OK(read(pipes[0], buffer, 200)), 100);
    OK(close(file));
    OK(close(pipes[0]));
    OK(close(pipes[1]));
}

static void options(int fd)
{
    int value = 1;
    socklen_t size = sizeof value;
    struct address name = {.size = sizeof name.storage};
    OK(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, sizeof value));
    OK(getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &size));
    OK(getsockname(fd, ADDRESS(&name), &name.size));
    OK(getpeername(fd, ADDRESS(&name), &name.size));
    OK(ioctl(fd, FIONREAD, &value));
    OK(fcntl(fd, F_SETFL, OK(fcntl(fd, F_GETFL)) & ~O_NONBLOCK));
}

// Sends the connection through a UNIX socket to this process itself. Returns another descriptor of it.
static int passed(int fd, char *buffer)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(sizeof fd)];
    } control = {.header = {CMSG_LEN(sizeof fd), SOL_SOCKET, SCM_RIGHTS}};
    memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    struct iovec part = {buffer, 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    CHECK_EQ(OK(sendmsg(unix_pair[0], &message, 0)), 1);
    CHECK_EQ(OK(recvmsg(unix_pair[1], &message, 0)), 1);
    memcpy(&fd, CMSG_DATA(&control.header), sizeof fd);
    return fd;
}

static void listeners(char *buffer)
{
    struct address at = ip4("127.0.0.1", 0);
    int own = OK(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0)), one = 1;
    OK(setsockopt(own, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
    OK(bind(own, ADDRESS(&at), at.size));
    OK(listen(own, 4));
    at = name_of(own);
    CHECK_ERR(accept4(own, NULL, NULL, 0), EAGAIN);
    int client = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(connect(client, ADDRESS(&at), at.size));
    int server = OK(accept(own, NULL, NULL));
    say(client, "hello");
    recv_exact(server, buffer, 5);
    OK(close(own));
    OK(close(server));
    CHECK_EQ(OK(read(client, buffer, 1)), 0);
    OK(close(client));
    client = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(connect(client, ADDRESS(&at), at.size), ECONNREFUSED);
    OK(close(client));
}

static void processes(int fd, char *buffer)
{
    pid_t child = fork_child();
    if (child == 0) {
        send_all(fd, buffer, 10);
        recv_exact(fd, buffer, 10);
        execl("/bin/true", "true", NULL);
        _exit(1);
    }
    wait_child(child);
    CHECK_EQ(OK(system("true")), 0);
    char *arguments[] = {"true", NULL};
    CHECK_EQ(posix_spawnp(&child, "true", NULL, NULL, arguments, environ), 0);
    wait_child(child);
    if ((child = vfork()) == 0) {
        execve("/bin/true", arguments, environ);
        _exit(1);
    }
    wait_child(child);
}

static void every_call_of_a_client(char *buffer)
{
    int fd = client_socket();
    // Before and after the connection is busy.
    for (int i = 0; i < 2; i++) {
        messages(fd, buffer);
        waits(fd, buffer);
        files(fd, buffer);
        options(fd);
        int copy = OK(dup(fd));
        OK(dup2(fd, copy));
        OK(close(copy));
        copy = passed(fd, buffer);
        send_all(copy, buffer, 100);
        recv_exact(fd, buffer, 100);
        OK(close(copy));
        exchange(fd, buffer, true);
    }
    listeners(buffer);
    processes(fd, buffer);
    OK(shutdown(fd, SHUT_RDWR));
    OK(close(fd));
}

TEST(the_smallest_stack_suffices_for_every_call) { run_both(echo_server, every_call_of_a_client); }

static int handler_fd;

static void exchange_in_handler(int signal)
{
    (void)signal;
    char byte = 'h';
    if (send(handler_fd, &byte, 1, 0) != 1 || recv(handler_fd, &byte, 1, 0) != 1)
        _exit(9);
}

TEST(an_alternate_signal_stack_of_the_usual_size_suffices_for_an_exchange)
{
    size_t page = sysconf(_SC_PAGESIZE), size = sysconf(_SC_SIGSTKSZ);
    size = (size + page - 1) / page * page;
    char *memory = mmap(NULL, page + size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    OK(mprotect(memory + page, size, PROT_READ | PROT_WRITE));
    stack_t alternate = {.ss_sp = memory + page, .ss_size = size};
    OK(sigaltstack(&alternate, NULL));
    on_signal(SIGUSR1, exchange_in_handler, SA_ONSTACK);
    listener = listen_anywhere(&server_address);
    struct small_thread server;
    start_small(&server, echo_server, 0);
    handler_fd = client_socket();
    for (int i = 0; i < 2 * ROUNDS; i++)
        CHECK_EQ(raise(SIGUSR1), 0);
    OK(close(handler_fd));
    join_small(&server, "the server");
}
