/* A fake NVRTC: "compiles" kernels into a text with the architecture and the number of words of a transfer, which the
 * fake driver parses. */
#include "fake.h"

#define FAILED 6
#define MAGIC 0xC0DE

struct program {
    int magic;
    char ptx[64];
};

static int programs;

static struct program *checked(void *handle, const char *function)
{
    struct program *program = handle;
    expect(program && program->magic == MAGIC, function, "not a program");
    return program;
}

int nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                       const char *const *includes)
{
    struct program *made;
    BEGIN(FAILED);
    expect(strstr(source, "extern \"C\" __global__ void lat_rd(") != NULL, __func__, "source without kernels");
    expect(strcmp(name, "kernels.cu") == 0, __func__, "name");
    expect(headers == 0 && !texts && !includes, __func__, "headers");
    made = calloc(1, sizeof *made);
    made->magic = MAGIC;
    programs++;
    *program = made;
    return 0;
}

int nvrtcCompileProgram(void *handle, int count, const char *const *options)
{
    const char *target = "--gpu-architecture=compute_", *words = "--define-macro=WORDS=";
    struct program *program = checked(handle, __func__);
    BEGIN(FAILED);
    expect(count == 2 && strncmp(options[0], target, strlen(target)) == 0, __func__, "target");
    expect(count == 2 && strncmp(options[1], words, strlen(words)) == 0, __func__, "words");
    snprintf(program->ptx, sizeof program->ptx, "fake ptx for %s, %s words", options[0] + strlen(target),
             options[1] + strlen(words));
    return 0;
}

int nvrtcGetPTXSize(void *handle, size_t *bytes)
{
    struct program *program = checked(handle, __func__);
    BEGIN(FAILED);
    *bytes = strlen(program->ptx) + 1;
    return 0;
}

int nvrtcGetPTX(void *handle, char *text)
{
    struct program *program = checked(handle, __func__);
    BEGIN(FAILED);
    strcpy(text, program->ptx);
    return 0;
}

static const char log_text[] = "kernels.cu(3): error: expected a ;\n1 error detected\n";

int nvrtcGetProgramLogSize(void *handle, size_t *bytes)
{
    checked(handle, __func__);
    *bytes = sizeof log_text;
    return 0;
}

int nvrtcGetProgramLog(void *handle, char *text)
{
    checked(handle, __func__);
    strcpy(text, log_text);
    return 0;
}

int nvrtcDestroyProgram(void **handle)
{
    struct program *program = checked(*handle, __func__);
    program->magic = 0;
    free(program);
    *handle = NULL;
    programs--;
    return 0;
}

__attribute__((destructor)) static void at_end(void)
{
    expect(programs == 0, __func__, "programs left");
}
