// Encoding and assembling rows without the interpreter: a small C ABI, called by data_pipeline/native/__init__.py.
//
// Everything that comes from a file is checked before it is used: offsets, codes of dictionaries and places of rows are
// numbers that damaged data can make anything of. Functions return 0, or -1 where a number points outside its memory,
// and then their output is undefined. No function keeps state; all may run in any number of threads.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

// A column of integers in Arrow's memory. As 64-bit words in this order.
struct PwColumn {
  const uint8_t* values;
  int64_t values_bytes;
  const uint8_t* validity;  // null: no nulls
  int64_t validity_bytes;
  int64_t offset;  // of the first row, in values and in bits of `validity`
  int64_t kind;    // 0: bits; 1, 2, 4, 8: unsigned; -1, -2, -4, -8: signed; -64: milliseconds of whole days
  uint64_t seed;
  uint64_t add;
  uint64_t missing;  // what a null becomes
  int64_t position;  // column of the output
};

// Keys of `columns`: out[row * stride + position].
int64_t pw_integers(int64_t rows, const PwColumn* columns, int64_t num_columns, uint64_t* out, int64_t stride);

// The bytes of words in Arrow's memory.
struct PwText {
  const uint8_t* data;
  int64_t data_bytes;
  const uint8_t* offsets;
  int64_t offsets_bytes;
  int64_t offset;  // of the first word
  int64_t kind;    // 4 or 8: bytes of an offset; -w: all words have w bytes, and there are no offsets
  int64_t words;
};

// Keys of all words. What is null has the key of whatever bytes lie there.
int64_t pw_texts(const PwText* text, uint64_t seed, uint64_t* out);

// Keys of the words with these numbers; a null's is 0. Only `values`, `validity`, `offset` and `kind` of `codes` matter.
int64_t pw_picked_texts(int64_t rows, const PwColumn* codes, const PwText* text, uint64_t seed, uint64_t* out);

// words[code] of each row; a null's is 0.
int64_t pw_picked(int64_t rows, const PwColumn* codes, const uint64_t* words, int64_t num_words, uint64_t* out);

// Lists of ids without those that are 0, cut to `most` from the front or the back; an empty one becomes `missing`
// unless that is 0. `out` has room for `capacity`, `out_offsets` for rows + 1. Returns how many ids were cut off.
int64_t pw_lists(int64_t rows, const uint64_t* keys, int64_t num_keys, const int64_t* starts, const int64_t* lengths,
                 int64_t most, int64_t keep_last, uint64_t missing, uint64_t* out, int64_t capacity,
                 int64_t* out_offsets);

// Rows of `row_bytes` at these places.
int64_t pw_gather(const uint8_t* from, int64_t rows, int64_t row_bytes, const int64_t* at, int64_t count, uint8_t* out);

// Items (4 or 8 bytes) of the lists at these places, one after the other, `capacity` in all.
int64_t pw_gather_lists(const uint8_t* items, int64_t num_items, int64_t item_bytes, const int64_t* offsets,
                        int64_t rows, const int64_t* at, int64_t count, uint8_t* out, int64_t capacity);

// Flat lists of 4-byte items to [rows, width], 0 where there is nothing.
int64_t pw_pad(const uint32_t* flat, int64_t num_items, const int64_t* lengths, int64_t rows, int64_t width,
               uint32_t* out);

// Distinct keys but 0, ordered by where each is last, and for every key 1 + its position among them (0 for 0).
// Returns how many; -1 without memory.
int64_t pw_unique(const uint64_t* keys, int64_t count, uint64_t* unique, int32_t* positions);

// Numbers of columns as float32: out[row * stride + position]. kind as above, and 132, 164: float32, float64, which
// lose nothing but digits. Null and NaN become `fill`, a float32, in the low bits of `add`; `seed` 0: there is none.
// Returns how many values cannot be used: nulls without a fill, and what is not finite.
int64_t pw_numbers(int64_t rows, const PwColumn* columns, int64_t num_columns, float* out, int64_t stride);
}
#pragma GCC visibility pop
