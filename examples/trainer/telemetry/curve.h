/* curve.h - loss.svg: the losses of training.csv and val.csv over the steps, for a browser. Twin:
   curve.c. No plotting library: two lines, a band and two axes. */
#ifndef CURVE_H
#define CURVE_H

#include "base/fault.h"

/* Reads the CSVs in the folder as they are at this moment; without a row there is no picture, and
   that is no fault. */
bool curve_write(const char *folder, fault *f);

#endif
