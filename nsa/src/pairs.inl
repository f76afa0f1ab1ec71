/* ---- Products of bf16 pairs, read once behind the tiles of their set ----------------------------
   Twin: kernels/tiles.cuh. Not here: the pieces of a product (tiles.inl), what each function does
   (nsa__pairs, tiles.h). */

/* See nsa__pairs. */
NSA__TARGET static void NSA__T(gemm)(int m, int n, int k, const nsa__matrix *a,
                                     const nsa__matrix *b, const nsa__result *c, nsa_real factor) {
    nsa__product x = {k, 0, a, b, c, factor, c->later};
    NSA__T(product)(m, n, &x);
}

/* nsa__to_bf16, lane by lane. A NaN keeps the quiet bit, which lies in the upper half. Only one
   with all bits of its mantissa set would overflow; arithmetic makes none. */
NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(rounded)(NSA__V x) {
    const NSA__T(bits) bits = (NSA__T(bits))x;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
/* The same of a factor of products, by one instruction where there is one. That takes subnormal
   numbers for 0, as the products do. */
NSA__INLINE NSA__TARGET NSA__T(bits) NSA__T(rounded_factor)(NSA__V x) {
#ifdef NSA__ROUND
    NSA__T(halves) numbers;
    NSA__ROUND(numbers, x);
    return __builtin_convertvector(numbers, NSA__T(bits));
#else
    return NSA__T(rounded)(x);
#endif
}
NSA__INLINE NSA__TARGET void NSA__T(put_halves)(uint16_t *to, NSA__T(bits) numbers) {
    const NSA__T(halves) halves = __builtin_convertvector(numbers, NSA__T(halves));
    memcpy(to, &halves, sizeof halves);
}

NSA__TARGET static void NSA__T(store)(int n, const nsa_real *x, void *row) {
    uint16_t *to = (uint16_t *)row;
    int j = 0;
    for (; j + NSA__L <= n; j += NSA__L)
        NSA__T(put_halves)(to + j, NSA__T(rounded)(NSA__FROM(x + j)));
    for (; j < n; j++) to[j] = nsa__to_bf16((float)x[j]);
}

/* The row's start takes the pairs: they lie before all that is still to be read. */
NSA__TARGET static void NSA__T(round_rows)(int rows, int n, ptrdiff_t ld, nsa_real *x) {
    for (int r = 0; r < rows; r++, x += ld)
        for (int j = 0; j < n; j += NSA__L)
            NSA__T(put_halves)((uint16_t *)x + j, NSA__T(rounded_factor)(NSA__FROM(x + j)));
}

/* A row of pairs goes to row r / 2, and so overwrites no number that is still to be read. An odd
   number of rows ends with zeros. */
NSA__TARGET static void NSA__T(round_pairs)(int rows, int n, ptrdiff_t ld, const int *row_index,
                                            const nsa_real *factor, nsa_real *x,
                                            nsa__packed *by_row) {
    for (int r = 0; r < rows; r += 2) {
        const int two = r + 1 < rows;
        const nsa_real *first = x + r * ld, *second = first + (two ? ld : 0);
        const NSA__V low = NSA__T(splat)(factor ? factor[row_index[r]] : 1),
                     high = NSA__T(splat)(factor && two ? factor[row_index[r + 1]] : 1);
        for (int j = 0; j < n; j += NSA__L) {
            const NSA__T(bits) a = NSA__T(rounded_factor)(NSA__FROM(first + j) * low);
            NSA__T(bits) b = {0};
            if (two) b = NSA__T(rounded_factor)(NSA__FROM(second + j) * high);
            if (by_row) NSA__T(put_halves)((uint16_t *)(by_row + r * ld / 2) + j, a);
            if (by_row && two) NSA__T(put_halves)((uint16_t *)(by_row + r * ld / 2) + ld + j, b);
            NSA__TO(x + r / 2 * ld + j) = (NSA__V)(a | b << 16);
        }
    }
}

/* See nsa__pairs. */
NSA__TARGET static void NSA__T(pair_rows)(int n, int wide, const nsa__matrix *x, nsa__packed *to) {
    for (int r = 0; r < n; r += 2, to += wide) {
        const nsa__packed *first = x->data + (x->rows ? x->rows[r] : r) * x->row, *second = NULL;
        if (r + 1 < n) second = x->data + (x->rows ? x->rows[r + 1] : r + 1) * x->row;
        for (int j = 0; j < wide; j += NSA__L) {
            NSA__T(bits) pairs = NSA__T(halves_at)((const uint16_t *)first + j);
            if (second) pairs |= NSA__T(halves_at)((const uint16_t *)second + j) << 16;
            NSA__TO(to + j) = (NSA__V)pairs;
        }
    }
}

static const nsa__pairs NSA__T(pairs) = {NSA__T(gemm), NSA__T(pair_rows), NSA__T(round_rows),
                                         NSA__T(round_pairs), NSA__T(store)};

#undef NSA__PIECE
#undef NSA__PIECES
#undef NSA__ISA
#undef NSA__BYTES
#undef NSA__ROWS
#undef NSA__NARROW
#undef NSA__VECTORS
#undef NSA__TARGET
#undef NSA__KEEP_IN_REGISTER
#undef NSA__MAX
#undef NSA__NEAREST
#undef NSA__SCALEF
#undef NSA__OF_F16
#undef NSA__DOT
#undef NSA__ROUND
#undef NSA__OF_HALVES
#undef NSA__OF_PAIRS
