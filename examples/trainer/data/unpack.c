/* unpack.c - see unpack.h. A stream may have several members (gzip) or frames (zstd) behind one
   another. Its end in the middle of one, and whatever fails a check, is a fault with its place in
   the packed file. */
#include "data/unpack.h"

#include <stdlib.h>
#include <string.h>

#ifdef NSA_HAVE_ZLIB
#include <zlib.h>
#endif
#ifdef NSA_HAVE_ZSTD
#include <zstd.h>
#endif

#if defined NSA_HAVE_ZLIB || defined NSA_HAVE_ZSTD
static bool is_cut(const char *name, int64_t at, fault *f) {
    return fault_set(f, "%s: its packed data end at byte %lld in the middle: cut short", name,
                     (long long)at);
}

static bool is_damaged(const char *name, int64_t at, const char *why, fault *f) {
    return fault_in_data(f, "%s: damaged: cannot unpack it at byte %lld: %s", name, (long long)at,
                         why);
}

/* What one call may hand to a library whose counts have 32 bits. */
static size_t at_most(size_t bytes) {
    return bytes < 1 << 30 ? bytes : 1 << 30;
}
#endif

/* ---- gzip ---- */

#ifdef NSA_HAVE_ZLIB
typedef struct gzip_state {
    z_stream z;
    int64_t taken;
    bool between; /* behind a member */
    bool padding; /* zeros, which tapes leave behind the last */
} gzip_state;

static bool gzip_step(lines_filter *filter, lines_piece *p, const char *name, fault *f) {
    gzip_state *g = filter->state;
    if (g->between && p->bytes) {
        g->between = false;
        g->padding = !p->from[0];
        if (!g->padding && inflateReset(&g->z) != Z_OK) return fault_set(f, "%s: zlib fails", name);
    }
    if (g->padding) {
        size_t zeros = 0;
        while (zeros < p->bytes && !p->from[zeros]) zeros++;
        if (zeros < p->bytes)
            return is_damaged(name, g->taken + (int64_t)zeros, "bytes behind its end", f);
        p->taken = zeros;
        g->taken += (int64_t)zeros;
        p->done = p->ended;
        return true;
    }
    if (g->between) {
        p->done = p->ended;
        return true;
    }
    uInt in = (uInt)at_most(p->bytes), room = (uInt)at_most(p->room);
    g->z.next_in = (Bytef *)(uintptr_t)p->from;
    g->z.avail_in = in;
    g->z.next_out = (Bytef *)p->to;
    g->z.avail_out = room;
    int result = inflate(&g->z, Z_NO_FLUSH);
    p->taken = in - g->z.avail_in;
    p->made = room - g->z.avail_out;
    g->taken += (int64_t)p->taken;
    g->between = result == Z_STREAM_END;
    if (result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR)
        return is_damaged(name, g->taken, g->z.msg ? g->z.msg : "zlib refuses it", f);
    if (!p->made && !p->taken && p->ended && !p->bytes) return is_cut(name, g->taken, f);
    return true;
}

static void gzip_close(lines_filter *filter) {
    gzip_state *g = filter->state;
    inflateEnd(&g->z);
    free(g);
}

static bool gzip_open(lines_filter *filter, const char *name, fault *f) {
    gzip_state *g = calloc(1, sizeof *g);
    if (!g || inflateInit2(&g->z, 15 + 16) != Z_OK) {
        free(g);
        return fault_set(f, "%s: out of memory", name);
    }
    *filter = (lines_filter){g, gzip_step, gzip_close};
    return true;
}
#endif

/* ---- zstd ---- */

#ifdef NSA_HAVE_ZSTD
typedef struct zstd_state {
    ZSTD_DCtx *context;
    int64_t taken;
    bool within; /* a frame */
} zstd_state;

static bool zstd_step(lines_filter *filter, lines_piece *p, const char *name, fault *f) {
    zstd_state *z = filter->state;
    if (!p->bytes && p->ended && !z->within) {
        p->done = true;
        return true;
    }
    ZSTD_inBuffer in = {p->from, p->bytes, 0};
    ZSTD_outBuffer out = {p->to, p->room, 0};
    size_t left = ZSTD_decompressStream(z->context, &out, &in);
    p->taken = in.pos;
    p->made = out.pos;
    z->taken += (int64_t)p->taken;
    if (ZSTD_isError(left)) return is_damaged(name, z->taken, ZSTD_getErrorName(left), f);
    if (p->taken || p->made) z->within = left != 0;
    if (!p->taken && !p->made && !p->bytes && p->ended) return is_cut(name, z->taken, f);
    return true;
}

static void zstd_close(lines_filter *filter) {
    zstd_state *z = filter->state;
    ZSTD_freeDCtx(z->context);
    free(z);
}

static bool zstd_open(lines_filter *filter, const char *name, fault *f) {
    zstd_state *z = calloc(1, sizeof *z);
    /* What zstd --long=31 packs: the window's room is taken as it is filled. */
    int widest = ZSTD_dParam_getBounds(ZSTD_d_windowLogMax).upperBound;
    if (!z || !(z->context = ZSTD_createDCtx()) ||
        ZSTD_isError(ZSTD_DCtx_setParameter(z->context, ZSTD_d_windowLogMax, widest))) {
        free(z);
        return fault_set(f, "%s: out of memory", name);
    }
    *filter = (lines_filter){z, zstd_step, zstd_close};
    return true;
}
#endif

bool unpack_lines(lines *l, format_packing packing, fault *f) {
    lines_filter filter = {NULL, NULL, NULL};
    bool ok = true;
    if (packing == FORMAT_PLAIN) return true;
#ifdef NSA_HAVE_ZLIB
    if (packing == FORMAT_GZIP) ok = gzip_open(&filter, l->name, f);
#endif
#ifdef NSA_HAVE_ZSTD
    if (packing == FORMAT_ZSTD) ok = zstd_open(&filter, l->name, f);
#endif
    if (!ok) return false;
    if (filter.step) return lines_unpack(l, filter, f);
    bool is_gzip = packing == FORMAT_GZIP;
    return fault_set(f,
                     "%s: packed by %s, and this build has no %s (Debian, Ubuntu: %s; then "
                     "configure anew); or unpack it first (%s)",
                     l->name, is_gzip ? "gzip" : "zstd", is_gzip ? "zlib" : "libzstd",
                     is_gzip ? "zlib1g-dev" : "libzstd-dev", is_gzip ? "gzip -d" : "zstd -d");
}
