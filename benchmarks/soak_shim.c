/* Injects faults of the file system and the clock into a process that preloads this library; see soak_shim.py.

   Counts the calls on paths below WORLD_BELOW, and injects the fault at the call that the variables select. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { PASS, FAIL, TEAR, SHORTEN };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const char *below, *call_wanted, *path_wanted, *action;
static size_t below_length;
static long at, error_wanted, log_fd = -1;
static atomic_long seen, clock_offset;
static atomic_int ready, failing;

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static const char *text(const char *name) {
    const char *found = getenv(name);
    return strdup(found ? found : "");
}

static int is_on(void) {
    if (atomic_load(&ready)) return 1;
    if (!getenv("WORLD_BELOW")) return 0;
    pthread_mutex_lock(&lock);
    if (!atomic_load(&ready)) {
        below = text("WORLD_BELOW");
        below_length = strlen(below);
        call_wanted = text("WORLD_CALL");
        path_wanted = text("WORLD_PATH");
        action = text("WORLD_ACTION");
        at = number("WORLD_AT");
        error_wanted = number("WORLD_ERRNO");
        const char *log = getenv("WORLD_LOG");
        if (log) log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        atomic_store(&ready, 1);
    }
    pthread_mutex_unlock(&lock);
    return 1;
}

static void say(const char *call, const char *path) {
    char line[5000];
    int length = snprintf(line, sizeof line, "%s\t%s\n", call, path);
    if (log_fd >= 0 && length > 0) syscall(SYS_write, log_fd, line, (size_t)length);
}

/* Returns the path of a descriptor, or of a name relative to a descriptor; NULL if there is no path. */
static const char *resolve(int directory, const char *name, char *buffer, size_t size) {
    if (name && name[0] == '/') return name;
    char link[64];
    if (directory == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, size - 1);
    if (length <= 0) return NULL;
    buffer[length] = 0;
    if (name) {
        while (name[0] == '.' && name[1] == '/') name += 2;
        snprintf(buffer + length, size - length, "/%s", name);
    }
    return buffer;
}

/* Decides what happens to a call. `writes` is nonzero if the call changes the file system. */
static int verdict(const char *call, int directory, const char *name, int writes) {
    if (!is_on()) return PASS;
    int kept = errno;
    char buffer[4096];
    const char *path = resolve(directory, name, buffer, sizeof buffer);
    errno = kept;
    if (!path || strncmp(path, below, below_length) || path[below_length] != '/') return PASS;
    path += below_length + 1;
    if (atomic_load(&failing)) {
        if (atomic_load(&failing) != 1 + writes) return PASS;
        errno = (int)error_wanted;
        return FAIL;
    }
    if (!at) { say(call, path); return PASS; }
    if (*call_wanted && strcmp(call_wanted, call)) return PASS;
    if (*path_wanted && fnmatch(path_wanted, path, 0)) return PASS;
    if (atomic_fetch_add(&seen, 1) + 1 != at) return PASS;
    say(call, path);
    if (!strcmp(action, "kill")) kill(getpid(), SIGKILL);
    if (!strcmp(action, "tear")) return TEAR;
    if (!strcmp(action, "shorten")) return SHORTEN;
    if (!strcmp(action, "stop")) kill(getpid(), SIGSTOP);
    if (!strcmp(action, "clock")) atomic_store(&clock_offset, number("WORLD_SECONDS"));
    if (!strcmp(action, "vanish")) syscall(SYS_renameat2, AT_FDCWD, getenv("WORLD_VICTIM"), AT_FDCWD, getenv("WORLD_TO"), 0);
    if (!strcmp(action, "fail-on")) atomic_store(&failing, 1 + writes);
    if (strncmp(action, "fail", 4)) return PASS;
    errno = (int)error_wanted;
    return FAIL;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

#define CHANGES(flags) (((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)) != 0)
#define OPENED(flags) (CHANGES(flags) ? "create" : "open")

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE(flags) \
        REAL(int, #name, const char *, int, ...); \
        return verdict(OPENED(flags), AT_FDCWD, path, CHANGES(flags)) == FAIL ? -1 : real(path, flags, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPEN_AT(name) \
    int name(int at_fd, const char *path, int flags, ...) { \
        MODE(flags) \
        REAL(int, #name, int, const char *, int, ...); \
        return verdict(OPENED(flags), at_fd, path, CHANGES(flags)) == FAIL ? -1 : real(at_fd, path, flags, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define OPEN_CHECKED(name) \
    int name(const char *path, int flags) { \
        REAL(int, #name, const char *, int); \
        return verdict(OPENED(flags), AT_FDCWD, path, CHANGES(flags)) == FAIL ? -1 : real(path, flags); \
    }
OPEN_CHECKED(__open_2)
OPEN_CHECKED(__open64_2)

#define OPEN_AT_CHECKED(name) \
    int name(int at_fd, const char *path, int flags) { \
        REAL(int, #name, int, const char *, int); \
        return verdict(OPENED(flags), at_fd, path, CHANGES(flags)) == FAIL ? -1 : real(at_fd, path, flags); \
    }
OPEN_AT_CHECKED(__openat_2)
OPEN_AT_CHECKED(__openat64_2)

#define FOPEN(name) \
    FILE *name(const char *path, const char *mode) { \
        REAL(FILE *, #name, const char *, const char *); \
        int writes = mode[0] != 'r' || strchr(mode, '+'); \
        return verdict(writes ? "create" : "open", AT_FDCWD, path, writes) == FAIL ? NULL : real(path, mode); \
    }
FOPEN(fopen)
FOPEN(fopen64)

static size_t part(int what, size_t count) { return what == PASS || count < 2 ? count : count / 2; }

ssize_t write(int fd, const void *buffer, size_t count) {
    REAL(ssize_t, "write", int, const void *, size_t);
    int what = verdict("write", fd, NULL, 1);
    if (what == FAIL) return -1;
    ssize_t written = real(fd, buffer, part(what, count));
    if (what == TEAR) kill(getpid(), SIGKILL);
    return written;
}

#define PWRITE(name) \
    ssize_t name(int fd, const void *buffer, size_t count, off_t offset) { \
        REAL(ssize_t, #name, int, const void *, size_t, off_t); \
        int what = verdict("write", fd, NULL, 1); \
        if (what == FAIL) return -1; \
        ssize_t written = real(fd, buffer, part(what, count), offset); \
        if (what == TEAR) kill(getpid(), SIGKILL); \
        return written; \
    }
PWRITE(pwrite)
PWRITE(pwrite64)

/* Writes only the first half of the first piece if the call is torn or shortened. */
ssize_t writev(int fd, const struct iovec *pieces, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    int what = verdict("write", fd, NULL, 1);
    if (what == FAIL) return -1;
    if (what == PASS || !count) return real(fd, pieces, count);
    struct iovec half = {pieces[0].iov_base, part(what, pieces[0].iov_len)};
    ssize_t written = real(fd, &half, 1);
    if (what == TEAR) kill(getpid(), SIGKILL);
    return written;
}

ssize_t read(int fd, void *buffer, size_t count) {
    REAL(ssize_t, "read", int, void *, size_t);
    return verdict("read", fd, NULL, 0) == FAIL ? -1 : real(fd, buffer, count);
}

#define PREAD(name) \
    ssize_t name(int fd, void *buffer, size_t count, off_t offset) { \
        REAL(ssize_t, #name, int, void *, size_t, off_t); \
        return verdict("read", fd, NULL, 0) == FAIL ? -1 : real(fd, buffer, count, offset); \
    }
PREAD(pread)
PREAD(pread64)

#define SYNC(name) \
    int name(int fd) { \
        REAL(int, #name, int); \
        return verdict("sync", fd, NULL, 1) == FAIL ? -1 : real(fd); \
    }
SYNC(fsync)
SYNC(fdatasync)

#define TRUNCATE(name) \
    int name(int fd, off_t length) { \
        REAL(int, #name, int, off_t); \
        return verdict("truncate", fd, NULL, 1) == FAIL ? -1 : real(fd, length); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    return verdict("rename", AT_FDCWD, to, 1) == FAIL ? -1 : real(from, to);
}
int renameat(int from_fd, const char *from, int to_fd, const char *to) {
    REAL(int, "renameat", int, const char *, int, const char *);
    return verdict("rename", to_fd, to, 1) == FAIL ? -1 : real(from_fd, from, to_fd, to);
}
int link(const char *from, const char *to) {
    REAL(int, "link", const char *, const char *);
    return verdict("link", AT_FDCWD, to, 1) == FAIL ? -1 : real(from, to);
}
int linkat(int from_fd, const char *from, int to_fd, const char *to, int flags) {
    REAL(int, "linkat", int, const char *, int, const char *, int);
    return verdict("link", to_fd, to, 1) == FAIL ? -1 : real(from_fd, from, to_fd, to, flags);
}
int unlink(const char *path) {
    REAL(int, "unlink", const char *);
    return verdict("unlink", AT_FDCWD, path, 1) == FAIL ? -1 : real(path);
}
int unlinkat(int directory, const char *path, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    return verdict("unlink", directory, path, 1) == FAIL ? -1 : real(directory, path, flags);
}
int rmdir(const char *path) {
    REAL(int, "rmdir", const char *);
    return verdict("unlink", AT_FDCWD, path, 1) == FAIL ? -1 : real(path);
}
int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    return verdict("mkdir", AT_FDCWD, path, 1) == FAIL ? -1 : real(path, mode);
}
int mkdirat(int directory, const char *path, mode_t mode) {
    REAL(int, "mkdirat", int, const char *, mode_t);
    return verdict("mkdir", directory, path, 1) == FAIL ? -1 : real(directory, path, mode);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    REAL(int, "clock_gettime", clockid_t, struct timespec *);
    int result = real(clock, now);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += atomic_load(&clock_offset);
    return result;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    REAL(int, "gettimeofday", struct timeval *restrict, void *restrict);
    int result = real(now, zone);
    if (!result) now->tv_sec += atomic_load(&clock_offset);
    return result;
}
time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
