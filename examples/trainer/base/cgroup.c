/* cgroup.c - see cgroup.h. */
#include "base/cgroup.h"

#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

double cgroup_number(const char *folder, const char *name) {
    char path[PATH_MAX];
    double x = INFINITY;
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return INFINITY;
    FILE *file = fopen(path, "r");
    if (!file || fscanf(file, "%lf", &x) != 1 || !(x >= 0)) x = INFINITY;
    if (file) fclose(file);
    return x;
}

double cgroup_least(const char *root, const char *group, cgroup_limit limit) {
    char folder[PATH_MAX];
    double least = INFINITY;
    int length = snprintf(folder, sizeof folder, "%s%s", root, group);
    if (length < 0 || length >= (int)sizeof folder) return INFINITY;
    for (size_t end = (size_t)length;; end--) {
        if (folder[end] && folder[end] != '/') continue;
        folder[end] = 0;
        least = fmin(least, limit(folder));
        if (end <= strlen(root)) return least;
    }
}

/* Whether "cpu,cpuacct" names the controller. */
static bool names(const char *list, size_t bytes, const char *controller) {
    size_t length = strlen(controller);
    for (const char *at = list; at + length <= list + bytes; at += strcspn(at, ",:") + 1)
        if (!strncmp(at, controller, length) && (at[length] == ',' || at[length] == ':'))
            return true;
    return false;
}

double cgroup_here(cgroup_limit limit, const char *controller, cgroup_limit limit_1) {
    char line[PATH_MAX], root[64];
    double least = INFINITY;
    FILE *file = fopen("/proc/self/cgroup", "r");
    snprintf(root, sizeof root, "/sys/fs/cgroup/%.32s", controller ? controller : "");
    while (file && fgets(line, sizeof line, file)) { /* "0::/a", or "4:cpu,cpuacct:/a" */
        line[strcspn(line, "\n")] = 0;
        const char *list = strchr(line, ':'), *group = list ? strchr(list + 1, ':') : NULL;
        if (!group) continue;
        size_t bytes = (size_t)(group - list);
        if (bytes == 1 && limit)
            least = fmin(least, cgroup_least("/sys/fs/cgroup", group + 1, limit));
        else if (limit_1 && names(list + 1, bytes, controller))
            least = fmin(least, cgroup_least(root, group + 1, limit_1));
    }
    if (file) fclose(file);
    return least;
}
