// Network namespaces: a socket belongs to the one in which it was created, whatever the namespace of the thread is.
#include "check.h"

#include <net/if.h>
#include <sched.h>

static int own_namespace(void)
{
    return OK(open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
}

// Moves the calling thread to a new network namespace whose loopback interface is up.
static void enter_new_namespace(void)
{
    if (unshare(CLONE_NEWNET) != 0)
        skip("creating a network namespace is not permitted");
    struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP};
    int fd = OK(socket(AF_INET, SOCK_DGRAM, 0));
    OK(ioctl(fd, SIOCSIFFLAGS, &loopback));
    OK(close(fd));
}

static bool has_client(int listener)
{
    struct pollfd waiting = {.fd = listener, .events = POLLIN};
    return poll(&waiting, 1, SILENCE_MS) == 1;
}

static void check_reaches(int client, const struct address *at, int listener, int other)
{
    OK(connect(client, ADDRESS(at), at->size));
    CHECK(has_client(listener));
    CHECK(!has_client(other));
    int server = accept_from(listener);
    ping_pong(client, server);
    OK(close(server));
    OK(close(client));
}

TEST(a_socket_reaches_the_namespace_of_its_creation)
{
    struct address at;
    int here = listen_anywhere(&at), home = own_namespace();
    int from_here = OK(socket(AF_INET, SOCK_STREAM, 0));
    enter_new_namespace();
    int away = own_namespace(), there = listen_at(&at, 8);
    int from_there = OK(socket(AF_INET, SOCK_STREAM, 0));
    // Each socket is used in the namespace of the other.
    check_reaches(from_here, &at, here, there);
    OK(setns(home, CLONE_NEWNET));
    check_reaches(from_there, &at, there, here);
    // Each socket is used in its own namespace.
    check_reaches(OK(socket(AF_INET, SOCK_STREAM, 0)), &at, here, there);
    OK(setns(away, CLONE_NEWNET));
    check_reaches(OK(socket(AF_INET, SOCK_STREAM, 0)), &at, there, here);
}

TEST(a_listener_serves_the_namespace_of_its_creation)
{
    int home = own_namespace();
    struct address at = ip4("127.0.0.1", 0);
    enter_new_namespace();
    int away = own_namespace(), listener = OK(socket(AF_INET, SOCK_STREAM, 0));
    OK(bind(listener, ADDRESS(&at), at.size));
    at = name_of(listener);
    OK(setns(home, CLONE_NEWNET));
    OK(listen(listener, 8));
    int outsider = OK(socket(AF_INET, SOCK_STREAM, 0));
    CHECK_ERR(connect(outsider, ADDRESS(&at), at.size), ECONNREFUSED);
    OK(setns(away, CLONE_NEWNET));
    greet(&at, listener);
}
