/* text.h - text that strangers wrote: which bytes are a character, and what of it may be printed.
   Twin: text.c. It decodes nothing. */
#ifndef TEXT_H
#define TEXT_H

#include <stddef.h>
#include <stdio.h>

/* Bytes of the well-formed UTF-8 character that `text` begins with, or 0 (Unicode, table 3-7). */
size_t text_character(const char *text, size_t left);

/* What steers a terminal, ends the line or turns its direction becomes "?", a byte each: control
   characters (C0, DEL, C1), line and paragraph separators, bidirectional controls, and bytes that
   are no UTF-8, which a terminal of eight bits may take for C1. */
void text_keep_printable(char *text);

/* One line on a stream, of which only its own newline is not printable. */
void text_print_line(FILE *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
