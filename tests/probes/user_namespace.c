#define _GNU_SOURCE
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* user_namespace MAP UID PROGRAM ARGS...: runs a program as a user of a user namespace, and of its group alone. MAP has
   ranges of users, and of groups with the same numbers: INSIDE OUTSIDE COUNT, separated by commas, as
   "0 0 1,999 999 1". Exits with 77 where there are no such namespaces. */

static int write_map(pid_t process, const char *name, const char *map) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)process, name);
    int file = open(path, O_WRONLY | O_CLOEXEC);
    return file >= 0 && write(file, map, strlen(map)) == (ssize_t)strlen(map) && close(file) == 0;
}

int main(int count, char **arguments) {
    int ready[2];
    if (count < 4 || pipe2(ready, O_CLOEXEC) != 0) {
        return 2;
    }
    for (char *comma = arguments[1]; (comma = strchr(comma, ',')) != NULL; *comma = '\n') {
    }
    pid_t process = getpid(), mapper = fork();
    if (mapper == 0) {
        char byte;
        close(ready[1]);
        int is_ready = read(ready[0], &byte, 1) == 1;
        int is_done = is_ready && write_map(process, "uid_map", arguments[1]);
        _exit(!(is_done && write_map(process, "gid_map", arguments[1])));
    }
    int status = 1, is_inside = unshare(CLONE_NEWUSER) == 0;
    if (is_inside && write(ready[1], "", 1) != 1) {
        return 77;
    }
    close(ready[1]);
    if (waitpid(mapper, &status, 0) != mapper || status != 0) {
        perror("user_namespace");
        return 77;
    }
    unsigned user = (unsigned)strtoul(arguments[2], NULL, 10);
    if (setgroups(0, NULL) != 0 || setresgid(user, user, user) != 0 || setresuid(user, user, user) != 0) {
        perror(arguments[2]);
        return 77;
    }
    execvp(arguments[3], arguments + 3);
    perror(arguments[3]);
    return 127;
}
