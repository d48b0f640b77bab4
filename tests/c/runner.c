// Runs the checks, each in a forked child that leads a process group, with a time limit.
#include "check.h"

#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>

#define CHECKS_MAX 1024
#define REPORT_BYTES_MAX 4096
#define CHECK_TIMEOUT_S 30
// Above the small descriptor numbers that checks rely on.
#define REPORT_FD_MIN 700
// The descriptors of the checks, and the numbers that they request, are below this limit.
#define DESCRIPTORS_MIN 1024

struct check {
    const char *name;
    check_fn *run;
};
static struct check checks[CHECKS_MAX];
static int check_count;
static int report_fd = -1;

void register_check(const char *name, check_fn *run)
{
    if (check_count == CHECKS_MAX)
        abort();
    checks[check_count++] = (struct check){name, run};
}

// Writes one line to the runner: a kind (F, S, I), then the text. It is short enough to be atomic on a pipe.
static void report(char kind, const char *prefix, const char *format, va_list arguments)
{
    char line[512];
    int used = snprintf(line, sizeof line, "%c%s", kind, prefix);
    used += vsnprintf(line + used, sizeof line - used - 1, format, arguments);
    if (used > (int)sizeof line - 2)
        used = sizeof line - 2;
    line[used++] = '\n';
    if (syscall(SYS_write, report_fd, line, used) != used)
        abort();
}

_Thread_local char failure_note[160];

void fail_at(const char *file, int line, const char *format, ...)
{
    char place[288];
    const char *slash = strrchr(file, '/');
    snprintf(place, sizeof place, "%s:%d: %s", slash ? slash + 1 : file, line, failure_note);
    va_list arguments;
    va_start(arguments, format);
    report('F', place, format, arguments);
    va_end(arguments);
    kill(0, SIGKILL); // the group of this check, so that no peer waits for ever
    _exit(1);
}

void skip(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report('S', "", format, arguments);
    va_end(arguments);
    kill(0, SIGKILL);
    _exit(1);
}

void info(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report('I', "", format, arguments);
    va_end(arguments);
}

static int timeout_s(void)
{
    const char *text = getenv("SEMANTICS_TIMEOUT_S");
    int value = text ? atoi(text) : 0;
    return value > 0 ? value : CHECK_TIMEOUT_S;
}

static void run_in_child(const struct check *check, int report_write)
{
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    report_fd = fcntl(report_write, F_DUPFD_CLOEXEC, REPORT_FD_MIN);
    if (report_fd < 0)
        abort();
    close(report_write);
    check->run();
    _exit(0);
}

// Returns whether the child ended in time. Uses raw system calls: the runner must not depend on what it tests.
static bool ends_in_time(pid_t pid)
{
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (pidfd < 0)
        return false;
    struct pollfd entry = {.fd = pidfd, .events = POLLIN};
    struct timespec limit = {.tv_sec = timeout_s()};
    long ready = syscall(SYS_ppoll, &entry, 1, &limit, NULL, 0);
    close(pidfd);
    return ready == 1;
}

// Kills the whole group and reaps its processes that became children of the runner.
static int end_group(pid_t leader)
{
    int status = 0;
    kill(-leader, SIGKILL);
    waitpid(leader, &status, 0);
    while (waitpid(-1, NULL, WNOHANG) > 0)
        ;
    return status;
}

static void describe_end(int status, bool in_time, char *text, size_t size)
{
    if (!in_time)
        snprintf(text, size, "timed out after %d s", timeout_s());
    else if (WIFSIGNALED(status))
        snprintf(text, size, "killed by SIG%s", sigabbrev_np(WTERMSIG(status)));
    else
        snprintf(text, size, "exited with %d", WEXITSTATUS(status));
}

static void read_report(int fd, char *text)
{
    size_t used = 0;
    while (used < REPORT_BYTES_MAX - 1) {
        long got = syscall(SYS_read, fd, text + used, REPORT_BYTES_MAX - 1 - used);
        if (got <= 0)
            break;
        used += (size_t)got;
    }
    text[used] = 0;
    close(fd);
}

enum verdict { PASSED, FAILED, SKIPPED };

static enum verdict judge(const struct check *check, char *reported, int status, bool in_time)
{
    char why[128];
    bool ended_well = in_time && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    describe_end(status, in_time, why, sizeof why);
    for (char *line = strtok(reported, "\n"); line; line = strtok(NULL, "\n")) {
        if (line[0] == 'I') {
            printf("info %s: %s\n", check->name, line + 1);
        } else if (line[0] == 'S') {
            printf("skip %s: %s\n", check->name, line + 1);
            return SKIPPED;
        } else {
            printf("FAIL %s: %s\n", check->name, line + 1);
            return FAILED;
        }
    }
    printf(ended_well ? "ok %s\n" : "FAIL %s: %s\n", check->name, why);
    return ended_well ? PASSED : FAILED;
}

static enum verdict run_check(const struct check *check)
{
    int pipe_fds[2];
    char reported[REPORT_BYTES_MAX];
    if (pipe2(pipe_fds, O_CLOEXEC) != 0) {
        printf("FAIL %s: no pipe: %s\n", check->name, strerror(errno));
        return FAILED;
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(pipe_fds[0]);
        run_in_child(check, pipe_fds[1]);
    }
    close(pipe_fds[1]);
    setpgid(pid, pid); // also done by the child; whichever runs first wins
    bool in_time = ends_in_time(pid);
    int status = end_group(pid);
    read_report(pipe_fds[0], reported);
    enum verdict verdict = judge(check, reported, status, in_time);
    fflush(stdout);
    return verdict;
}

static bool names_check(const char *argument, const char *name)
{
    size_t size = strlen(argument);
    return strncmp(argument, name, size) == 0 && (name[size] == 0 || name[size] == '.');
}

static bool wanted(const char *name, int count, char **arguments)
{
    for (int i = 0; i < count; i++)
        if (names_check(arguments[i], name))
            return true;
    return count == 0;
}

static bool arguments_are_known(int count, char **arguments)
{
    for (int i = 0; i < count; i++) {
        bool known = false;
        for (int c = 0; c < check_count; c++)
            known = known || names_check(arguments[i], checks[c].name);
        if (!known) {
            fprintf(stderr, "semantics: no check is named %s; --list prints them\n", arguments[i]);
            return false;
        }
    }
    return true;
}

// The program of the checks of exec: copies one descriptor to another.
static int echo(int in, int out)
{
    char buffer[4096];
    ssize_t got;
    while ((got = read(in, buffer, sizeof buffer)) > 0)
        if (write(out, buffer, got) != got)
            return 1;
    return got == 0 ? 0 : 1;
}

static int use_both_endpoints(int server, int client)
{
    expect(server, "before");
    ping_pong(client, server);
    ping_pong(server, client);
    return 0;
}

static int echo_accepted(int listener, int count)
{
    for (; count > 0; count--) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0 || echo(fd, fd) != 0)
            return 1;
        close(fd);
    }
    return 0;
}

static bool descriptors_suffice(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return false;
    if (limit.rlim_cur >= DESCRIPTORS_MIN)
        return true;
    limit.rlim_cur = DESCRIPTORS_MIN;
    if (limit.rlim_max >= DESCRIPTORS_MIN && setrlimit(RLIMIT_NOFILE, &limit) == 0)
        return true;
    fprintf(stderr, "semantics: the hard descriptor limit is %ld; raise it to %d (ulimit -n)\n",
            (long)limit.rlim_max, DESCRIPTORS_MIN);
    return false;
}

static int list(void)
{
    for (int i = 0; i < check_count; i++)
        puts(checks[i].name);
    return 0;
}

int main(int argc, char **argv)
{
    int counts[3] = {0};
    if (argc == 2 && strcmp(argv[1], "--echo-stdio") == 0)
        return echo(0, 1);
    if (argc == 2 && strcmp(argv[1], "--use-both-endpoints") == 0)
        return use_both_endpoints(0, 1);
    if (argc == 2 && strcmp(argv[1], "--options-of-stdin") == 0)
        return options_of(0);
    if (argc == 4 && strcmp(argv[1], "--echo-accepted") == 0)
        return echo_accepted(atoi(argv[2]), atoi(argv[3]));
    if (argc == 2 && strcmp(argv[1], "--list") == 0)
        return list();
    if (!arguments_are_known(argc - 1, argv + 1) || !descriptors_suffice())
        return 2;
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    for (int i = 0; i < check_count; i++)
        if (wanted(checks[i].name, argc - 1, argv + 1))
            counts[run_check(&checks[i])]++;
    fprintf(stderr, "%d ok, %d failed, %d skipped\n", counts[PASSED], counts[FAILED],
            counts[SKIPPED]);
    return counts[FAILED] ? 1 : 0;
}
