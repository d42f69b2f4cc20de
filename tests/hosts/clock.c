/* A clock that is wrong by CLOCK_AHEAD_S seconds, for all that a process asks its libc; `clocks.py` builds it.

   With CLOCK_OF_FILES=client a file's time is this clock's, too, as on file systems where the client sets it: when it is
   synced, and when it is set to "now". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

static long ahead_s(void) {
    const char *text = getenv("CLOCK_AHEAD_S");
    return text ? atol(text) : 0;
}

static int sets_files(void) {
    const char *text = getenv("CLOCK_OF_FILES");
    return text && strcmp(text, "client") == 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += ahead_s();
    return result;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    if (result == 0) now->tv_sec += ahead_s();
    return result;
}

static void now_twice(struct timespec times[2]) {
    clock_gettime(CLOCK_REALTIME, &times[0]);
    times[1] = times[0];
}

int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    struct timespec own[2];
    if (!times && sets_files()) {
        now_twice(own);
        times = own;
    }
    return REAL(utimensat)(folder, path, times, flags);
}

int fsync(int file) {
    struct timespec own[2];
    struct stat status;
    if (sets_files() && fstat(file, &status) == 0 && S_ISREG(status.st_mode)) {
        now_twice(own);
        REAL(futimens)(file, own);
    }
    return REAL(fsync)(file);
}
