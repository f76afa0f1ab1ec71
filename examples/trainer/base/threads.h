/* threads.h - how many threads this process may have running, and how OpenMP's wait. Twin:
   threads.c. How many there are is ops.h's. */
#ifndef THREADS_H
#define THREADS_H

/* First in main. libgomp's threads spin when they have nothing to do; on two cores that something
   else uses too, a run was 24 times slower for it. What makes them sleep instead is a variable that
   is read when a program is loaded, so this runs the program again with it, in the same process.
   Where the user has set OMP_WAIT_POLICY, and without OpenMP, it returns at once. */
void threads_wait_asleep(char **argv);

/* Processors that this process may use at a time: those of its affinity, and no more than the CPU
   quota of its control group pays for. */
int threads_available(void);

/* What the user asks for: the setting, or OMP_NUM_THREADS, or 0 where neither is given. */
int threads_asked(int setting);

/* Threads for a team: what is asked for, or what OpenMP offers, but no more than
   threads_available(), because threads beyond that only take turns. */
int threads_granted(int setting);

/* What a quota pays for, rounded up; INT_MAX where there is none. `root` is where control groups
   (version 2) are mounted, `group` that of a process, "/a/b": a quota of any of its parents holds
   too. */
int threads_of_quota(const char *root, const char *group);

#endif
