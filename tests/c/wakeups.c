// Processes that pass numbers around in rings. Each sleeps in some kind of wait until the one before it wakes it. A
// ring in which a wake-up is lost stands still.
//
// LAPS is the number of times that a number passes around each ring.
#include "check.h"

#include <sys/select.h>

enum { RINGS = 2, MEMBERS = 40, LAPS = 200, PAUSE_US = 200 };

static uint64_t laps(void)
{
    const char *text = getenv("LAPS");
    return text ? strtoull(text, NULL, 10) : LAPS;
}

static void await_input(int fd, int epoll, int how)
{
    if (how == 0) {
        await(fd, POLLIN);
    } else if (how == 1) {
        fd_set set;
        FD_ZERO(&set);
        FD_SET(fd, &set);
        CHECK_EQ(select(fd + 1, &set, NULL, NULL, &(struct timeval){.tv_sec = WAIT_MS_MAX / 1000}), 1);
    } else if (how == 2) {
        CHECK(epoll_one(epoll).events & EPOLLIN);
    } // else the receive itself waits
}

static void receive_number(int fd, int epoll, int how, uint64_t expected)
{
    uint64_t number;
    await_input(fd, epoll, how);
    recv_exact(fd, &number, sizeof number);
    CHECK_EQ(number, expected);
}

static void pass_on(int from, int to, uint64_t state, bool begins)
{
    int epoll = epoll_with(from, random_next(&state) % 2 ? EPOLLIN : EPOLLIN | EPOLLET);
    for (uint64_t lap = 0, count = laps(); lap < count; lap++) {
        uint64_t decision = random_next(&state);
        if (begins) {
            usleep(PAUSE_US); // all others stop to spin, and sleep
            send_all(to, &lap, sizeof lap);
        }
        if (decision % 1024 == 0)
            usleep(decision / 1024 % 100);
        receive_number(from, epoll, decision / 131072 % 5, lap);
        if (!begins)
            send_all(to, &lap, sizeof lap);
    }
    OK(close(epoll));
}

TEST(no_wake_up_is_lost)
{
    pid_t children[RINGS * MEMBERS];
    for (int ring = 0; ring < RINGS; ring++) {
        struct address addresses[MEMBERS];
        int listeners[MEMBERS];
        for (int i = 0; i < MEMBERS; i++)
            listeners[i] = listen_anywhere(&addresses[i]);
        for (int i = 0; i < MEMBERS; i++) {
            pid_t child = fork_child();
            if (child == 0) {
                int to = dial(&addresses[(i + 1) % MEMBERS]), from = accept_from(listeners[i]);
                pass_on(from, to, 1000 * ring + i, i == 0);
                _exit(0);
            }
            children[ring * MEMBERS + i] = child;
        }
        for (int i = 0; i < MEMBERS; i++)
            OK(close(listeners[i]));
    }
    for (int i = 0; i < RINGS * MEMBERS; i++)
        wait_child(children[i]);
}
