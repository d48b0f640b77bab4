// Shared libraries that a program loads while it runs.
#include "check.h"

#include <dlfcn.h>
#include <link.h>
#include <string.h>

// Compiles C source to `folder`/NAME.so.
static void build(const char *folder, const char *name, const char *options, const char *source)
{
    char line[600];
    snprintf(line, sizeof line, "%s/%s.c", folder, name);
    FILE *file = fopen(line, "w");
    CHECK(file);
    fputs(source, file);
    fclose(file);
    snprintf(line, sizeof line, "cc -shared -fPIC -o %s/%s.so %s/%s.c %s", folder, name, folder, name, options);
    CHECK_EQ(system(line), 0);
}

static char *new_folder(void)
{
    static char folder[] = "/tmp/plugin-XXXXXX";
    CHECK(mkdtemp(folder));
    return folder;
}

static void remove_folder(const char *folder)
{
    char line[100];
    snprintf(line, sizeof line, "rm -r %s", folder);
    CHECK_EQ(system(line), 0);
}

static void *load(const char *folder, const char *name, int flags)
{
    char path[100];
    snprintf(path, sizeof path, "%s/%s.so", folder, name);
    void *plugin = dlopen(path, flags);
    if (!plugin)
        FAIL("%s", dlerror());
    return plugin;
}

static const char answer_source[] = "#include <sys/socket.h>\n"
                                    "#include <unistd.h>\n"
                                    "int answer(int fd) {\n"
                                    "    char bytes[64];\n"
                                    "    ssize_t size = recv(fd, bytes, sizeof bytes, 0);\n"
                                    "    return size > 0 && write(fd, bytes, size) == size ? (int)size : -1;\n"
                                    "}\n";

static void use_plugin(void *plugin)
{
    int (*answer)(int) = (int (*)(int))dlsym(plugin, "answer");
    CHECK(answer);
    for (int is_old = 0; is_old < 2; is_old++) {
        struct pair pair = connected_pair();
        for (int round = 0; is_old && round < 10; round++)
            ping_pong(pair.client, pair.server);
        for (int round = 0; round < 3; round++) {
            say(pair.client, "hello");
            CHECK_EQ(answer(pair.server), 5);
            expect(pair.client, "hello");
        }
        ping_pong(pair.client, pair.server);
    }
}

TEST(a_plugin_that_binds_to_its_own_libraries_first_uses_connections)
{
    char *folder = new_folder();
    build(folder, "plugin", "", answer_source);
    use_plugin(load(folder, "plugin", RTLD_NOW | RTLD_DEEPBIND));
    build(folder, "lazy", "-Wl,-z,lazy", answer_source);
    use_plugin(load(folder, "lazy", RTLD_LAZY | RTLD_DEEPBIND | RTLD_GLOBAL));
    build(folder, "named", "", answer_source);
    char path[100];
    snprintf(path, sizeof path, "%s/named.so", folder);
    void *named = dlmopen(LM_ID_BASE, path, RTLD_NOW | RTLD_DEEPBIND);
    CHECK(named);
    use_plugin(named);
    remove_folder(folder);
    CHECK(!dlopen("/nowhere/nothing.so", RTLD_NOW | RTLD_DEEPBIND));
    CHECK(strstr(dlerror(), "nothing.so"));
}

TEST(a_library_finds_plugins_by_its_own_search_path)
{
    char *folder = new_folder(), options[200];
    build(folder, "inner", "", "int inner(void) { return 42; }\n");
    snprintf(options, sizeof options, "-ldl -Wl,-rpath,%s", folder);
    build(folder, "outer", options,
          "#define _GNU_SOURCE\n"
          "#include <dlfcn.h>\n"
          "int outer(void) {\n"
          "    void *inner = dlopen(\"inner.so\", RTLD_NOW);\n"
          "    void *again = dlmopen(LM_ID_BASE, \"inner.so\", RTLD_NOW);\n"
          "    int (*call)(void) = inner && inner == again ? (int (*)(void))dlsym(inner, \"inner\") : 0;\n"
          "    return call ? call() : -1;\n"
          "}\n");
    int (*outer)(void) = (int (*)(void))dlsym(load(folder, "outer", RTLD_NOW), "outer");
    CHECK(outer);
    CHECK_EQ(outer(), 42);
    remove_folder(folder);
}
