/* curve.c - see curve.h. Where there are more steps than columns of the picture, a column shows the
   mean of its steps as a line and their range as a band. */
#include "telemetry/curve.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/files.h"
#include "telemetry/csv.h"

enum { WIDTH = 800, HEIGHT = 450, LEFT = 60, RIGHT = 20, TOP = 30, BOTTOM = 45 };
enum { COLUMNS = WIDTH - LEFT - RIGHT };

/* The steps that fall into one column of the picture. */
typedef struct column {
    double step, sum, least, most; /* step: the first of them */
    int64_t count;
} column;

typedef struct series {
    double last;
    int64_t count;
    column columns[COLUMNS + 1];
} series;

typedef struct picture {
    double step_min, step_max, loss_min, loss_max; /* of both */
    series training, validation;
    series *reading;
} picture;

/* ---- Reading ---- */

static double x_of(const picture *p, double step) {
    double span = p->step_max - p->step_min;
    return LEFT + (span > 0 ? (step - p->step_min) / span : 0.5) * COLUMNS;
}

static double y_of(const picture *p, double loss) {
    double span = p->loss_max - p->loss_min;
    return TOP + (span > 0 ? (p->loss_max - loss) / span : 0.5) * (HEIGHT - TOP - BOTTOM);
}

static void empty(series *s) {
    const column none = {.least = INFINITY, .most = -INFINITY};
    s->count = 0;
    for (int i = 0; i <= COLUMNS; i++) s->columns[i] = none;
}

/* A loss that is no number is left out. */
static void add_to_span(void *user, const double *values) {
    picture *p = user;
    if (!isfinite(values[1])) return;
    p->reading->count++;
    p->reading->last = values[1];
    p->step_min = fmin(p->step_min, values[0]);
    p->step_max = fmax(p->step_max, values[0]);
    p->loss_min = fmin(p->loss_min, values[1]);
    p->loss_max = fmax(p->loss_max, values[1]);
}

static void add_to_column(void *user, const double *values) {
    picture *p = user;
    double place = x_of(p, values[0]) - LEFT;
    if (!isfinite(values[1]) || !(place >= 0 && place <= COLUMNS)) return; /* written since */
    column *c = &p->reading->columns[(int)place];
    if (!c->count++) c->step = values[0];
    c->sum += values[1];
    c->least = fmin(c->least, values[1]);
    c->most = fmax(c->most, values[1]);
}

/* Once for the span, once for the columns: memory does not depend on the number of steps. */
static bool read_series(picture *p, const char *folder, fault *f) {
    static void (*const passes[])(void *user, const double *values) = {add_to_span, add_to_column};
    for (int i = 0; i < 2; i++) {
        p->reading = &p->training;
        if (csv_read(folder, "training.csv", 2, passes[i], p, f) < 0) return false;
        p->reading = &p->validation;
        if (csv_read(folder, "val.csv", 2, passes[i], p, f) < 0) return false;
    }
    return true;
}

/* ---- Drawing ---- */

/* 1, 2 or 5 times a power of ten: at most `most` of them in the span. */
static double tick_distance(double span, int most) {
    static const double factors[] = {2, 2.5, 2};
    double distance = pow(10, floor(log10(span / most)));
    for (int i = 0; span / distance > most; i++) distance *= factors[i % 3];
    return distance;
}

static void draw_ticks(FILE *out, const picture *p, bool is_step) {
    double from = is_step ? p->step_min : p->loss_min, to = is_step ? p->step_max : p->loss_max;
    if (to <= from) return;
    double distance = tick_distance(to - from, is_step ? 10 : 8);
    if (is_step) distance = fmax(distance, 1);
    for (double n = ceil(from / distance); n * distance <= to; n++) {
        double value = n * distance;
        if (is_step)
            fprintf(out,
                    "<text x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%.0f</text>\n"
                    "<path class=\"grid\" d=\"M%.1f %dV%d\"/>\n",
                    x_of(p, value), HEIGHT - BOTTOM + 18, value, x_of(p, value), TOP,
                    HEIGHT - BOTTOM);
        else
            fprintf(out,
                    "<text x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%.6g</text>\n"
                    "<path class=\"grid\" d=\"M%d %.1fH%d\"/>\n",
                    LEFT - 6, y_of(p, value) + 4, value, LEFT, y_of(p, value), WIDTH - RIGHT);
    }
}

static void draw_line(FILE *out, const picture *p, const series *s, const char *class) {
    if (!s->count) return;
    fprintf(out, "<polyline class=\"%s\" points=\"", class);
    for (const column *c = s->columns; c <= s->columns + COLUMNS; c++)
        if (c->count)
            fprintf(out, "%.1f,%.1f ", x_of(p, c->step), y_of(p, c->sum / (double)c->count));
    fprintf(out, "\"/>\n");
}

static void draw_range(FILE *out, const picture *p, const series *s) {
    fprintf(out, "<path class=\"range\" d=\"");
    for (const column *c = s->columns; c <= s->columns + COLUMNS; c++)
        if (c->count)
            fprintf(out, "M%.1f %.1fV%.1f", x_of(p, c->step), y_of(p, c->most), y_of(p, c->least));
    fprintf(out, "\"/>\n");
}

static void draw_dots(FILE *out, const picture *p, const series *s) {
    for (const column *c = s->columns; c <= s->columns + COLUMNS; c++)
        if (c->count)
            fprintf(out, "<circle class=\"validation\" r=\"2.5\" cx=\"%.1f\" cy=\"%.1f\"/>\n",
                    x_of(p, c->step), y_of(p, c->sum / (double)c->count));
}

static void draw(FILE *out, const picture *p) {
    fprintf(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\">\n<style>\n"
        ".ground { fill: #ffffff } text { font: 12px sans-serif; fill: #444 }\n"
        "path, polyline { fill: none } .grid { stroke: #ddd } .range { stroke: #b7d0ea }\n"
        ".training { stroke: #1f5fa8; stroke-width: 1.5 }\n"
        "polyline.validation { stroke: #c0501e; stroke-width: 1.5 }\n"
        "circle.validation { fill: #c0501e }\n"
        "@media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #e6edf3 }\n"
        ".grid { stroke: #30363d } .range { stroke: #28466b } .training { stroke: #6cb0ff }\n"
        "polyline.validation { stroke: #ff9f6b } circle.validation { fill: #ff9f6b } }\n"
        "</style>\n<rect class=\"ground\" width=\"%d\" height=\"%d\"/>\n",
        WIDTH, HEIGHT, WIDTH, HEIGHT);
    draw_ticks(out, p, true);
    draw_ticks(out, p, false);
    draw_range(out, p, &p->training);
    draw_line(out, p, &p->training, "training");
    draw_line(out, p, &p->validation, "validation");
    draw_dots(out, p, &p->validation);
    fprintf(out, "<text x=\"%d\" y=\"18\">loss, nats per token: training to step %.0f, last %.4f",
            LEFT, p->step_max, p->training.last);
    if (p->validation.count) fprintf(out, "; validation (dots), last %.4f", p->validation.last);
    fprintf(out, "</text>\n<text x=\"%d\" y=\"%d\" text-anchor=\"middle\">step</text>\n</svg>\n",
            LEFT + COLUMNS / 2, HEIGHT - 8);
}

/* Straight into a file beside its place: a picture in memory would be the run's largest
   allocation. */
static bool write_picture(const picture *p, const char *folder, fault *f) {
    char path[1280], aside[1280];
    if (!files_join(path, sizeof path, folder, "loss.svg", f) ||
        !files_join(aside, sizeof aside, folder, ".loss.svg", f))
        return false;
    int fd = files_open_anew(aside, f);
    FILE *out = fd < 0 ? NULL : fdopen(fd, "w");
    if (fd >= 0 && !out) close(fd), fault_set(f, "%s: out of memory", path);
    if (!out) return false;
    draw(out, p);
    bool ok = !ferror(out) || fault_errno(f, "%s: cannot write", path);
    if (fclose(out) && ok) ok = fault_errno(f, "%s: cannot write", path);
    if (ok && rename(aside, path)) ok = fault_errno(f, "%s: cannot put in place", path);
    if (!ok) unlink(aside);
    return ok;
}

bool curve_write(const char *folder, fault *f) {
    picture *p = malloc(sizeof *p);
    if (!p) return fault_set(f, "%s: out of memory for the curve", folder);
    p->step_min = p->loss_min = INFINITY;
    p->step_max = p->loss_max = -INFINITY;
    empty(&p->training);
    empty(&p->validation);
    bool ok = read_series(p, folder, f);
    if (ok && p->training.count) ok = write_picture(p, folder, f);
    free(p);
    return ok;
}
