// hand-on ADDRESS PORT: sends requests to a Redis server over one connection from this process, from another process
// that receives the descriptor by SCM_RIGHTS, and from the program that replaces this one by exec.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static const char QUESTION[] = "PING\r\n", ANSWER[] = "+PONG\r\n";

static void must(int holds, const char *what) {
    if (holds)
        return;
    perror(what);
    exit(1);
}

static void ask(int server, const char *who) {
    char answer[sizeof(ANSWER)] = {0};
    size_t length = 0;
    must(send(server, QUESTION, sizeof(QUESTION) - 1, 0) == sizeof(QUESTION) - 1, "send");
    while (length < sizeof(ANSWER) - 1) {
        ssize_t received = recv(server, answer + length, sizeof(ANSWER) - 1 - length, 0);
        must(received > 0, "recv");
        length += received;
    }
    must(strcmp(answer, ANSWER) == 0, answer);
    printf("answered %s\n", who);
    fflush(stdout);
}

// Control data with room for one descriptor.
union control {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr header;
};

static void send_descriptor(int channel, int descriptor) {
    union control control = {.header = {CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS}};
    struct iovec byte = {"x", 1};
    struct msghdr message = {NULL, 0, &byte, 1, control.bytes, sizeof(control), 0};
    memcpy(CMSG_DATA(&control.header), &descriptor, sizeof(int));
    must(sendmsg(channel, &message, 0) == 1, "sendmsg");
}

static int receive_descriptor(int channel) {
    union control control = {0};
    char space;
    struct iovec byte = {&space, 1};
    struct msghdr message = {NULL, 0, &byte, 1, control.bytes, sizeof(control), 0};
    int descriptor;
    must(recvmsg(channel, &message, 0) == 1 && control.header.cmsg_type == SCM_RIGHTS, "recvmsg");
    memcpy(&descriptor, CMSG_DATA(&control.header), sizeof(int));
    return descriptor;
}

// Replaces the process by this program with a descriptor.
static void become(const char *what, int descriptor) {
    char number[16];
    snprintf(number, sizeof(number), "%d", descriptor);
    execl("/proc/self/exe", "hand-on", what, number, NULL);
    must(0, "execl");
}

static void ask_by_another(int server) {
    int channel[2], status;
    must(socketpair(AF_UNIX, SOCK_STREAM, 0, channel) == 0, "socketpair");
    if (fork() == 0) {
        close(server);
        become("message", channel[1]);
    }
    send_descriptor(channel[0], server);
    must(wait(&status) > 0 && status == 0, "wait");
}

int main(int count, char **words) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    must(count == 3, "usage: hand-on ADDRESS PORT");
    alarm(120); // Without a connection it would wait for an answer until the lab ends.
    if (strcmp(words[1], "message") == 0) {
        ask(receive_descriptor(atoi(words[2])), "by message");
        return 0;
    }
    if (strcmp(words[1], "exec") == 0) {
        ask(atoi(words[2]), "after exec");
        return 0;
    }
    int server = socket(AF_INET, SOCK_STREAM, 0);
    address.sin_port = htons(atoi(words[2]));
    must(inet_pton(AF_INET, words[1], &address.sin_addr) == 1, words[1]);
    must(connect(server, (struct sockaddr *)&address, sizeof(address)) == 0, "connect");
    ask(server, "at first");
    ask_by_another(server);
    become("exec", server);
}
