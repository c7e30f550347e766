/* Babai's nearest plane for the columns of one block, as in `_round_block` of babai.py; see there for the formulas.
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

/* One tile of rows through all columns. `t` holds the weights with what earlier blocks add to them, `e` the weights alone; it becomes their
 * errors where `codes` is not NULL. `group` tells the row of `scale` and `zero` for each column. */
INLINE void round_tile(const float *t, float *e, int8_t *codes, float *loss, const float *c, const float *diag, const float *scale,
                       const float *zero, const int64_t *group, int64_t columns, int64_t ld, int count, float low, float high, int dtype,
                       float *errors) {
    float total[TILE] = {0};
    for (int64_t k = 0; k < columns; k++) {
        float w[TILE], x[TILE], s[TILE], z[TILE];
        load(x, t + k * ld, count, 0.0f);
        load(w, e + k * ld, count, 0.0f);
        load(s, scale + group[k] * ld, count, 1.0f);
        if (zero) load(z, zero + group[k] * ld, count, 0.0f);
        else memset(z, 0, sizeof z);
        for (int64_t j = 0; j < k; j++) {
            float share = c[k * columns + j];
            const float *error = errors + j * TILE;
            for (int r = 0; r < TILE; r++) x[r] += share * error[r];
        }
        float code[TILE], *error = errors + k * TILE;
        for (int r = 0; r < TILE; r++) {
            float place = x[r] / s[r] + z[r];
            place = place < low ? low : place > high ? high : place;
            code[r] = nearbyintf(place);
            float value = stored((code[r] - z[r]) * s[r], dtype);
            float miss = (x[r] - value) * diag[k];
            total[r] += miss * miss;
            error[r] = w[r] - value;
        }
        if (codes) {
            memcpy(e + k * ld, error, sizeof(float) * count);
            for (int r = 0; r < count; r++) codes[k * ld + r] = (int8_t)code[r];
        }
    }
    for (int r = 0; r < count; r++) loss[r] += total[r];
}

#define FOR_TILES(dtype) \
    for (int64_t first = begin; first < end; first += TILE) { \
        int count = end - first < TILE ? (int)(end - first) : TILE; \
        for (int64_t p = 0; p < candidates; p++) \
            round_tile(t + first, e + first, codes ? codes + first : NULL, loss + p * ld + first, c, diag, scale + p * ld + first, \
                       zero ? zero + first : NULL, group, columns, ld, count, low, high, dtype, errors); \
    }

/* Rows `begin` to `end` with each of `candidates` scales; returns 0, or 1 where memory is short. */
int round_rows(const float *t, float *e, int8_t *codes, float *loss, const float *c, const float *diag, const float *scale,
               const float *zero, const int64_t *group, int64_t columns, int64_t ld, int64_t begin, int64_t end, int64_t candidates,
               float low, float high, int dtype) {
    float *errors = malloc(sizeof(float) * TILE * columns);
    if (!errors) return 1;
    if (dtype == FLOAT32) { FOR_TILES(FLOAT32) }
    else if (dtype == BFLOAT16) { FOR_TILES(BFLOAT16) }
    else { FOR_TILES(FLOAT16) }
    free(errors);
    return 0;
}
