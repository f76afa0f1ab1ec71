/* muon.c - see muon.h. */
#include "model/muon.h"

#include <math.h>

enum { ITERATIONS = 5 };

static const double A = 3.4445, B = -4.7750, C = 2.0315;

const real *muon_orthogonalize(const ops *o, const muon_room *room, const real *from, int rows,
                               int cols) {
    bool wide = rows <= cols;
    int side = wide ? rows : cols, length = wide ? cols : rows;
    int64_t squares = (int64_t)side * side, count = (int64_t)rows * cols;
    real *x = room->x, *y = room->y, *g = room->gram, *p = room->square;
    o->unit(o, x, from, count);
    for (int i = 0; i < ITERATIONS; i++) {
        o->product(o, wide ? PRODUCT_NT : PRODUCT_TN, g, x, x, side, side, length);
        o->product(o, PRODUCT_NN, p, g, g, side, side, side);
        o->mix(o, p, g, B, C, squares);
        if (wide)
            o->product(o, PRODUCT_NN, y, p, x, rows, cols, side);
        else
            o->product(o, PRODUCT_NN, y, x, p, rows, cols, side);
        o->mix(o, y, x, A, 1, count);
        real *next = y;
        y = x;
        x = next;
    }
    return x;
}

double muon_scale(int rows, int cols) {
    return 0.2 * sqrt(rows > cols ? rows : cols);
}
