/* unpack.h - data packed by gzip (zlib) or zstd (libzstd), where the build has these. Twin:
   unpack.c. It packs nothing. */
#ifndef UNPACK_H
#define UNPACK_H

#include "base/lines.h"
#include "data/format.h"

/* From its next byte on, `l` gives what the packed bytes unpack to. */
bool unpack_lines(lines *l, format_packing packing, fault *f);

#endif
