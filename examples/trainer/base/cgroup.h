/* cgroup.h - what the control groups of this process allow, versions 1 and 2. Twin: cgroup.c. What
   the numbers are for is threads.h's and memory.h's. */
#ifndef CGROUP_H
#define CGROUP_H

/* A limit that a group's folder holds; INFINITY where it has none. */
typedef double (*cgroup_limit)(const char *folder);

/* The least of a group's own limit and its parents'. `root` is where the groups are mounted,
   `group` that of a process, "/a/b"; one that is not there (a container sees its own as the root)
   has its parents'. */
double cgroup_least(const char *root, const char *group, cgroup_limit limit);

/* The same of this process: by the limits of version 2, and by those of version 1's controller;
   NULL: not asked for. */
double cgroup_here(cgroup_limit limit, const char *controller, cgroup_limit limit_1);

/* The first number of a file of a folder; INFINITY where there is none, or a word ("max"). */
double cgroup_number(const char *folder, const char *name);

#endif
