/* threads.h - how OpenMP's threads wait. Twin: threads.c. How many there are is ops.h's. */
#ifndef THREADS_H
#define THREADS_H

/* First in main. libgomp's threads spin when they have nothing to do; on two cores that something
   else uses too, a run was 24 times slower for it. What makes them sleep instead is a variable that
   is read when a program is loaded, so this runs the program again with it, in the same process.
   Where the user has set OMP_WAIT_POLICY, and without OpenMP, it returns at once. */
void threads_wait_asleep(char **argv);

#endif
