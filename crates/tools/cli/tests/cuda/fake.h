/* Shared by the two fake NVIDIA libraries: a log of everything that a caller does wrong, and calls that fail on request
 * of a test.
 *
 *   FAKE_CUDA_LOG   file to which complaints are appended
 *   FAKE_CUDA_FAIL  NAME or NAME@N: that function fails, from its Nth call on */
#ifndef FAKE_H
#define FAKE_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void complain(const char *format, ...)
{
    va_list arguments;
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    if (!log)
        abort();
    va_start(arguments, format);
    vfprintf(log, format, arguments);
    va_end(arguments);
    fputc('\n', log);
    fclose(log);
}

static void expect(int holds, const char *function, const char *what)
{
    if (!holds)
        complain("%s: %s", function, what);
}

/* Returns whether this call must fail; `calls` counts the calls of the function. */
static int shall_fail(const char *function, unsigned *calls)
{
    const char *wanted = getenv("FAKE_CUDA_FAIL");
    const char *at = wanted ? strchr(wanted, '@') : NULL;
    size_t length = at ? (size_t)(at - wanted) : wanted ? strlen(wanted) : 0;
    *calls += 1;
    return wanted && strlen(function) == length && strncmp(function, wanted, length) == 0 &&
           *calls >= (at ? (unsigned)atoi(at + 1) : 1);
}

/* Placed at the top of each function. */
#define BEGIN(code)                                                                                                    \
    static unsigned calls;                                                                                             \
    if (shall_fail(__func__, &calls))                                                                                  \
        return code

#endif
