/* stop.h - the text that generate prints, up to the first of some texts that end it. Twin: stop.c.
   Bytes that may begin such a text wait until it is known. */
#ifndef STOP_H
#define STOP_H

#include "base/option.h"
#include "train/sample.h"

typedef struct stop_printer {
    sample_printer out;
    const option_list *stops; /* none of them empty */
    char *held;
    size_t count, room;
    bool found; /* one of them: nothing is printed from it on */
} stop_printer;

/* Prints what can be printed once `bytes` are there too. */
bool stop_put(stop_printer *p, const char *bytes, size_t count, fault *f);

/* At the end of the text: what was held back. */
void stop_flush(stop_printer *p);

void stop_close(stop_printer *p);

#endif
