/* Babai's nearest plane for the columns of one block, and the search for the scales of groups, as in babai.py; see there for formulas.
 *
 * Matrices are float32 and column-major in the sense of the weight: [columns, ld], where the `rows` of a weight lie side by side. Rows are
 * independent, so a tile of them goes through all columns while its errors stay in the first cache. What a row becomes depends neither on
 * the tile nor on the thread that it falls into.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TILE 32
#define INLINE static inline __attribute__((always_inline))

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

/* Round half to even to the dtype in which scales are stored, as a loader will when it multiplies code and scale. */
INLINE float stored(float value, int dtype) {
    uint32_t bits;
    float rounded;
    memcpy(&bits, &value, 4);
    if (dtype == BFLOAT16) {
        bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
        memcpy(&rounded, &bits, 4);
        return rounded;
    }
    if (dtype == FLOAT16) {
        float magnitude = fabsf(value);
        float subnormal = (magnitude + 0.75f) - 0.75f; /* multiples of 2^-24 */
        bits = (bits + 0xfffu + ((bits >> 13) & 1u)) & 0xffffe000u;
        memcpy(&rounded, &bits, 4);
        rounded = fabsf(rounded) > 65504.0f ? copysignf(INFINITY, value) : rounded;
        return magnitude < 6.103515625e-05f ? copysignf(subnormal, value) : rounded;
    }
    return value;
}

INLINE void load(float *tile, const float *from, int count, float filling) {
    for (int r = 0; r < TILE; r++) tile[r] = filling;
    memcpy(tile, from, sizeof(float) * count);
}

/* One tile of rows through some columns; column k lies at `at[k]` of `t` and `e`. `t` holds the weights with what earlier blocks add to
 * them, `e` the weights alone; it becomes their errors where `codes` is not NULL. `group` tells the row of `scale` and `zero`, `gone` which
 * weights are to be zero whatever they cost, if any. */
INLINE void round_tile(const float *t, float *e, int8_t *codes, float *total, const float *c, const float *diag, const float *scale,
                       const float *zero, const uint8_t *gone, const int64_t *at, const int64_t *group, int64_t columns, int64_t ld,
                       int count, float low, float high, int dtype, float *errors) {
    for (int r = 0; r < TILE; r++) total[r] = 0.0f;
    for (int64_t k = 0; k < columns; k++) {
        int64_t place = at ? at[k] : k, row = group ? group[k] : 0;
        float w[TILE], x[TILE], s[TILE], z[TILE];
        uint8_t none[TILE];
        load(x, t + place * ld, count, 0.0f);
        load(w, e + place * ld, count, 0.0f);
        load(s, scale + row * ld, count, 1.0f);
        if (zero) load(z, zero + row * ld, count, 0.0f);
        else memset(z, 0, sizeof z);
        memset(none, 0, sizeof none);
        if (gone) memcpy(none, gone + place * ld, count);
        for (int64_t j = 0; j < k; j++) {
            float share = c[k * columns + j];
            const float *error = errors + j * TILE;
            for (int r = 0; r < TILE; r++) x[r] += share * error[r];
        }
        float code[TILE], *error = errors + k * TILE;
        for (int r = 0; r < TILE; r++) {
            float on_grid = x[r] / s[r] + z[r];
            on_grid = on_grid < low ? low : on_grid > high ? high : on_grid;
            code[r] = none[r] ? z[r] : nearbyintf(on_grid);
            float value = stored((code[r] - z[r]) * s[r], dtype);
            float miss = (x[r] - value) * diag[k];
            total[r] += miss * miss;
            error[r] = w[r] - value;
        }
        if (codes) {
            memcpy(e + place * ld, error, sizeof(float) * count);
            for (int r = 0; r < count; r++) codes[place * ld + r] = (int8_t)code[r];
        }
    }
}

INLINE void round_all(const float *t, float *e, int8_t *codes, float *loss, const float *c, const float *diag, const float *scale,
                      const float *zero, const uint8_t *gone, const int64_t *group, int64_t columns, int64_t ld, int64_t begin,
                      int64_t end, float low, float high, int dtype, float *errors) {
    float total[TILE];
    for (int64_t first = begin; first < end; first += TILE) {
        int count = end - first < TILE ? (int)(end - first) : TILE;
        round_tile(t + first, e + first, codes + first, total, c, diag, scale + first, zero ? zero + first : NULL,
                   gone ? gone + first : NULL, NULL, group, columns, ld, count, low, high, dtype, errors);
        for (int r = 0; r < count; r++) loss[first + r] += total[r];
    }
}

/* Rows `begin` to `end` of one block of columns, as `_round_block`; returns 0, or 1 where memory is short. */
int round_rows(const float *t, float *e, int8_t *codes, float *loss, const float *c, const float *diag, const float *scale,
               const float *zero, const uint8_t *gone, const int64_t *group, int64_t columns, int64_t ld, int64_t begin, int64_t end,
               float low, float high, int dtype) {
    float *errors = malloc(sizeof(float) * TILE * columns);
    if (!errors) return 1;
    if (dtype == FLOAT32) round_all(t, e, codes, loss, c, diag, scale, zero, gone, group, columns, ld, begin, end, low, high, FLOAT32, errors);
    else if (dtype == BFLOAT16) round_all(t, e, codes, loss, c, diag, scale, zero, gone, group, columns, ld, begin, end, low, high, BFLOAT16, errors);
    else round_all(t, e, codes, loss, c, diag, scale, zero, gone, group, columns, ld, begin, end, low, high, FLOAT16, errors);
    free(errors);
    return 0;
}

INLINE void search_tile(const float *w, const float *c, const float *diag, float *scale, const float *zero, const uint8_t *gone,
                        const float *multiples, int64_t candidates, const int64_t *at, int64_t columns, int64_t ld, int count, float low,
                        float high, int dtype, float *errors) {
    float least[TILE], best[TILE], tried[TILE], total[TILE];
    for (int r = 0; r < count; r++) least[r] = INFINITY, best[r] = stored(multiples[0] * scale[r], dtype);
    for (int64_t p = 0; p < candidates; p++) {
        for (int r = 0; r < count; r++) tried[r] = stored(multiples[p] * scale[r], dtype);
        round_tile(w, (float *)w, NULL, total, c, diag, tried, zero, gone, at, NULL, columns, ld, count, low, high, dtype, errors);
        for (int r = 0; r < count; r++) /* a candidate that rounds to zero is no scale */
            if (tried[r] > 0.0f && total[r] < least[r]) least[r] = total[r], best[r] = tried[r];
    }
    memcpy(scale, best, sizeof(float) * count);
}

/* For rows `begin` to `end` the best multiple of the scale of every group: of group g, the columns at `at[bounds[g]]` to
 * `at[bounds[g + 1]]`, with their part of the whole factor: `unit` is its transpose, rows and columns in the order of rounding. */
int search_rows(const float *w, const float *unit, const float *diag, float *scale, const float *zero, const uint8_t *gone,
                const float *multiples, const int64_t *at, const int64_t *bounds, int64_t groups, int64_t all_columns, int64_t ld, int64_t candidates,
                int64_t begin, int64_t end, float low, float high, int dtype) {
    int64_t widest = 0;
    for (int64_t g = 0; g < groups; g++) if (bounds[g + 1] - bounds[g] > widest) widest = bounds[g + 1] - bounds[g];
    float *part = malloc(sizeof(float) * widest * (widest + TILE + 1));
    if (!part) return 1;
    float *own = part + widest * widest, *errors = own + widest;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t *places = at + bounds[g];
        int64_t columns = bounds[g + 1] - bounds[g];
        for (int64_t k = 0; k < columns; k++) {
            own[k] = diag[places[k]];
            for (int64_t j = 0; j < k; j++) part[k * columns + j] = unit[places[k] * all_columns + places[j]];
        }
        for (int64_t first = begin; first < end; first += TILE) {
            int count = end - first < TILE ? (int)(end - first) : TILE;
            float *scales = scale + g * ld + first;
            const float *zeros = zero ? zero + g * ld + first : NULL;
            const uint8_t *none = gone ? gone + first : NULL;
            if (dtype == FLOAT32)
                search_tile(w + first, part, own, scales, zeros, none, multiples, candidates, places, columns, ld, count, low, high, FLOAT32,
                            errors);
            else if (dtype == BFLOAT16)
                search_tile(w + first, part, own, scales, zeros, none, multiples, candidates, places, columns, ld, count, low, high, BFLOAT16,
                            errors);
            else
                search_tile(w + first, part, own, scales, zeros, none, multiples, candidates, places, columns, ld, count, low, high, FLOAT16,
                            errors);
        }
    }
    free(part);
    return 0;
}
