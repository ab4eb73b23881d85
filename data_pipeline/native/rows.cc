#include "rows.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>

namespace {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87, kP2 = 0xC2B2AE3D27D4EB4F, kP3 = 0x165667B19E3779F9;
constexpr uint64_t kP4 = 0x85EBCA77C2B2AE63, kP5 = 0x27D4EB2F165667C5;
constexpr uint64_t kInsteadOfZero = 0x9E3779B97F4A7C15;
constexpr int64_t kTile = 64;  // rows whose output stays in the first cache while one column after the other is written
constexpr int64_t kMillisOfDay = 86'400'000;

uint64_t Rotl(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

uint64_t NoZero(uint64_t key) { return key ? key : kInsteadOfZero; }

// The finaliser of splitmix64 (Steele, Lea, Flood 2014, variant 13).
uint64_t Mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

template <class T>
T Load(const uint8_t* from) {  // Arrow's buffers of files need not be aligned
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

uint64_t Round(uint64_t lane, uint64_t word) { return Rotl(lane + word * kP2, 31) * kP1; }

// XXH64 (xxHash specification 0.1.1).
uint64_t Xxh64(const uint8_t* p, int64_t length, uint64_t seed) {
  const uint8_t* end = p + length;
  uint64_t acc;
  if (length >= 32) {
    uint64_t lanes[4] = {seed + kP1 + kP2, seed + kP2, seed, seed - kP1};
    for (; end - p >= 32; p += 32)
      for (int i = 0; i < 4; ++i) lanes[i] = Round(lanes[i], Load<uint64_t>(p + 8 * i));
    acc = Rotl(lanes[0], 1) + Rotl(lanes[1], 7) + Rotl(lanes[2], 12) + Rotl(lanes[3], 18);
    for (uint64_t lane : lanes) acc = (acc ^ Round(0, lane)) * kP1 + kP4;
  } else {
    acc = seed + kP5;
  }
  acc += static_cast<uint64_t>(length);
  for (; end - p >= 8; p += 8) acc = Rotl(acc ^ Round(0, Load<uint64_t>(p)), 27) * kP1 + kP4;
  if (end - p >= 4) {
    acc = Rotl(acc ^ Load<uint32_t>(p) * kP1, 23) * kP2 + kP3;
    p += 4;
  }
  for (; p < end; ++p) acc = Rotl(acc ^ *p * kP5, 11) * kP1;
  acc = (acc ^ acc >> 33) * kP2;
  acc = (acc ^ acc >> 29) * kP3;
  return acc ^ acc >> 32;
}

bool Bit(const uint8_t* bits, int64_t at) { return bits[at >> 3] >> (at & 7) & 1; }

// Whether `count` items of `bytes` from item `offset` on lie within `available`; bytes 0: bits.
bool Fits(int64_t offset, int64_t count, int64_t bytes, int64_t available) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max() / 16;
  if (offset < 0 || count < 0 || available < 0 || offset > kMost || count > kMost || bytes > 8) return false;
  const int64_t end = offset + count;
  return count == 0 || (bytes == 0 ? (end + 7) / 8 : end * bytes) <= available;
}

int64_t Width(int64_t kind) {
  switch (kind) {
    case 0: return 0;
    case 132: return 4;
    case 164: case -64: return 8;
    case 1: case 2: case 4: case 8: return kind;
    case -1: case -2: case -4: case -8: return -kind;
    default: return -1;
  }
}

bool IsWithin(const PwColumn& c, int64_t rows) {
  const int64_t width = Width(c.kind);
  if (width < 0 || !Fits(c.offset, rows, width, c.values_bytes)) return false;
  return c.validity == nullptr || Fits(c.offset, rows, 0, c.validity_bytes);
}

int64_t Floor(int64_t value, int64_t by) { return value / by - (value % by < 0); }

// Calls `use(row, value)` for rows [first, last) of a column whose memory was checked.
template <class T, class Use>
void Each(const PwColumn& c, int64_t first, int64_t last, Use use) {
  const uint8_t* from = c.values + c.offset * static_cast<int64_t>(sizeof(T));
  for (int64_t row = first; row < last; ++row) use(row, Load<T>(from + row * static_cast<int64_t>(sizeof(T))));
}

template <class Use>
void EachInteger(const PwColumn& c, int64_t first, int64_t last, Use use) {
  switch (c.kind) {
    case 0:
      for (int64_t row = first; row < last; ++row) use(row, uint64_t{Bit(c.values, c.offset + row)});
      return;
    case 1: return Each<uint8_t>(c, first, last, use);
    case 2: return Each<uint16_t>(c, first, last, use);
    case 4: return Each<uint32_t>(c, first, last, use);
    case 8: return Each<uint64_t>(c, first, last, use);
    case -1: return Each<int8_t>(c, first, last, use);
    case -2: return Each<int16_t>(c, first, last, use);
    case -4: return Each<int32_t>(c, first, last, use);
    case -8: return Each<int64_t>(c, first, last, use);
    case -64: return Each<int64_t>(c, first, last, [&](int64_t row, int64_t v) { use(row, Floor(v, kMillisOfDay)); });
    default: return;
  }
}

template <class Use>
void EachNull(const PwColumn& c, int64_t first, int64_t last, Use use) {
  if (c.validity == nullptr) return;
  for (int64_t row = first; row < last; ++row)
    if (!Bit(c.validity, c.offset + row)) use(row);
}

// Where word `at` starts and ends; false if that is outside of its bytes.
bool Word(const PwText& t, int64_t at, int64_t* start, int64_t* end) {
  at += t.offset;
  if (t.kind < 0) {
    *start = at * -t.kind;
    *end = *start - t.kind;
    return true;  // checked as a whole
  }
  *start = t.kind == 4 ? Load<int32_t>(t.offsets + at * 4) : Load<int64_t>(t.offsets + at * 8);
  *end = t.kind == 4 ? Load<int32_t>(t.offsets + at * 4 + 4) : Load<int64_t>(t.offsets + at * 8 + 8);
  return 0 <= *start && *start <= *end && *end <= t.data_bytes;
}

bool IsWithin(const PwText& t) {
  if (t.words < 0 || t.offset < 0 || t.data_bytes < 0) return false;
  if (t.words == 0) return true;
  if (t.kind == 4 || t.kind == 8) return Fits(t.offset, t.words + 1, t.kind, t.offsets_bytes);
  if (t.kind >= 0 || t.kind < -std::numeric_limits<int32_t>::max()) return false;
  return t.offset <= t.data_bytes / -t.kind && t.words <= t.data_bytes / -t.kind - t.offset;
}

// `use(row, code)` of each row that is not null; false for a code outside of the words.
template <class Use>
bool EachCode(int64_t rows, const PwColumn& codes, int64_t num_words, uint64_t* out, Use use) {
  bool good = codes.kind != 0 && codes.kind != -64 && codes.kind < 100 && IsWithin(codes, rows);
  if (!good) return false;
  EachInteger(codes, 0, rows, [&](int64_t row, auto code) {
    if (codes.validity != nullptr && !Bit(codes.validity, codes.offset + row)) {
      out[row] = 0;
    } else if (static_cast<uint64_t>(static_cast<int64_t>(code)) >= static_cast<uint64_t>(num_words)) {
      good = false;
    } else {
      good &= use(row, static_cast<int64_t>(code));
    }
  });
  return good;
}

// Which slot a key falls into must not be known to those who choose ids: they could make all collide.
const uint64_t kFactor = [] {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;
}();

}  // namespace

int64_t pw_integers(int64_t rows, const PwColumn* columns, int64_t num_columns, uint64_t* out, int64_t stride) {
  for (int64_t i = 0; i < num_columns; ++i)
    if (columns[i].kind >= 100 || !IsWithin(columns[i], rows)) return -1;
  for (int64_t first = 0; first < rows; first += kTile) {
    const int64_t last = first + kTile < rows ? first + kTile : rows;
    for (int64_t i = 0; i < num_columns; ++i) {
      const PwColumn& c = columns[i];
      uint64_t* to = out + c.position;
      EachInteger(c, first, last, [&](int64_t row, auto value) {
        to[row * stride] = NoZero(Mix((static_cast<uint64_t>(static_cast<int64_t>(value)) + c.add) ^ c.seed));
      });
      EachNull(c, first, last, [&](int64_t row) { to[row * stride] = c.missing; });
    }
  }
  return 0;
}

int64_t pw_texts(const PwText* text, uint64_t seed, uint64_t* out) {
  if (!IsWithin(*text)) return -1;
  for (int64_t at = 0, start, end; at < text->words; ++at) {
    if (!Word(*text, at, &start, &end)) return -1;
    out[at] = NoZero(Xxh64(text->data + start, end - start, seed));
  }
  return 0;
}

int64_t pw_picked_texts(int64_t rows, const PwColumn* codes, const PwText* text, uint64_t seed, uint64_t* out) {
  if (!IsWithin(*text)) return -1;
  return EachCode(rows, *codes, text->words, out, [&](int64_t row, int64_t code) {
    int64_t start, end;
    if (!Word(*text, code, &start, &end)) return false;
    out[row] = NoZero(Xxh64(text->data + start, end - start, seed));
    return true;
  }) ? 0 : -1;
}

int64_t pw_picked(int64_t rows, const PwColumn* codes, const uint64_t* words, int64_t num_words, uint64_t* out) {
  return EachCode(rows, *codes, num_words, out, [&](int64_t row, int64_t code) {
    out[row] = words[code];
    return true;
  }) ? 0 : -1;
}

int64_t pw_lists(int64_t rows, const uint64_t* keys, int64_t num_keys, const int64_t* starts, const int64_t* lengths,
                 int64_t most, int64_t keep_last, uint64_t missing, uint64_t* out, int64_t capacity,
                 int64_t* out_offsets) {
  int64_t written = 0, cut = 0;
  out_offsets[0] = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t start = starts[row], length = lengths[row];
    if (length < 0 || (length > 0 && (start < 0 || start > num_keys || length > num_keys - start))) return -1;
    if (length >= capacity - written) return -1;  // room for all, and for `missing`
    int64_t kept = 0;
    for (int64_t i = 0; i < length; ++i) {
      out[written + kept] = keys[start + i];
      kept += keys[start + i] != 0;
    }
    if (kept > most) {
      cut += kept - most;
      if (keep_last) std::memmove(out + written, out + written + kept - most, static_cast<size_t>(most) * 8);
      kept = most;
    }
    if (kept == 0 && missing != 0) out[written + kept++] = missing;
    written += kept;
    out_offsets[row + 1] = written;
  }
  return cut;
}

int64_t pw_gather(const uint8_t* from, int64_t rows, int64_t row_bytes, const int64_t* at, int64_t count,
                  uint8_t* out) {
  constexpr int64_t kAhead = 8;
  for (int64_t i = 0; i < count; ++i)
    if (at[i] < 0 || at[i] >= rows) return -1;
  const auto copy = [&](int64_t bytes) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count)
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + at[i + kAhead] * bytes + line);
      std::memcpy(out + i * bytes, from + at[i] * bytes, static_cast<size_t>(bytes));
    }
  };
  switch (row_bytes) {  // of known size: no call for each row
    case 0: return 0;
    case 4: copy(4); return 0;
    case 8: copy(8); return 0;
    default: copy(row_bytes); return 0;
  }
}

int64_t pw_gather_lists(const uint8_t* items, int64_t num_items, int64_t item_bytes, const int64_t* offsets,
                        int64_t rows, const int64_t* at, int64_t count, uint8_t* out, int64_t capacity) {
  int64_t written = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (at[i] < 0 || at[i] >= rows) return -1;
    const int64_t start = offsets[at[i]], end = offsets[at[i] + 1];
    if (start < 0 || end < start || end > num_items || end - start > capacity - written) return -1;
    if (end > start)
      std::memcpy(out + written * item_bytes, items + start * item_bytes,
                  static_cast<size_t>((end - start) * item_bytes));
    written += end - start;
  }
  return written == capacity ? 0 : -1;
}

int64_t pw_pad(const uint32_t* flat, int64_t num_items, const int64_t* lengths, int64_t rows, int64_t width,
               uint32_t* out) {
  int64_t read = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t length = lengths[row];
    if (length < 0 || length > width || length > num_items - read) return -1;
    uint32_t* to = out + row * width;
    if (length) std::memcpy(to, flat + read, static_cast<size_t>(length) * 4);
    std::memset(to + length, 0, static_cast<size_t>(width - length) * 4);
    read += length;
  }
  return read == num_items ? 0 : -1;
}

int64_t pw_unique(const uint64_t* keys, int64_t count, uint64_t* unique, int32_t* positions) {
  if (count < 0 || count > std::numeric_limits<int32_t>::max()) return -1;
  if (count == 0) return 0;
  try {
    // All write their place into a table, the last one wins; those that then read the place of another key try again
    // with another hash. No branch depends on a key, so nothing is mispredicted, and the table needs no clearing. Half
    // of the keys of a round find their place even if all are different.
    int bits = 10;
    while ((int64_t{1} << bits) < 2 * count) ++bits;
    const int shift = 64 - bits;
    const std::unique_ptr<int32_t[]> memory(new int32_t[(size_t{1} << bits) + static_cast<size_t>(count)]);
    int32_t* const table = memory.get();
    int32_t* const lost = table + (size_t{1} << bits);
    int32_t* const winner = positions;
    const auto places = static_cast<int32_t>(count);
    uint64_t factor = kFactor;
    for (int32_t i = 0; i < places; ++i) table[keys[i] * factor >> shift] = i;
    int32_t num_lost = 0;
    for (int32_t i = 0; i < places; ++i) {
      const int32_t found = table[keys[i] * factor >> shift];
      winner[i] = found;
      lost[num_lost] = i;
      num_lost += keys[found] != keys[i];
    }
    while (num_lost != 0) {
      factor = (factor * 0xD1342543DE82EF95 + 2) | 1;
      for (int32_t n = 0; n < num_lost; ++n) table[keys[lost[n]] * factor >> shift] = lost[n];
      int32_t left = 0;
      for (int32_t n = 0; n < num_lost; ++n) {
        const int32_t i = lost[n], found = table[keys[i] * factor >> shift];
        winner[i] = found;
        lost[left] = i;
        left += keys[found] != keys[i];
      }
      num_lost = left;
    }
    // A winner comes last of all with its key, so going back, its number is there before those who ask for it.
    int32_t number = 0;
    for (int32_t i = 0; i < places; ++i) {
      unique[number] = keys[i];
      number += (winner[i] == i) & (keys[i] != 0);
    }
    int32_t rank = number + 1;
    for (int32_t i = places - 1; i >= 0; --i) {
      const bool wins = winner[i] == i;
      rank -= wins & (keys[i] != 0);
      const int32_t own = keys[i] != 0 ? rank : 0;
      winner[i] = wins ? own : winner[winner[i]];
    }
    return number;
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

int64_t pw_numbers(int64_t rows, const PwColumn* columns, int64_t num_columns, float* out, int64_t stride) {
  for (int64_t i = 0; i < num_columns; ++i)
    if (!IsWithin(columns[i], rows)) return -1;
  int64_t wrong = 0;
  for (int64_t first = 0; first < rows; first += kTile) {
    const int64_t last = first + kTile < rows ? first + kTile : rows;
    for (int64_t i = 0; i < num_columns; ++i) {
      const PwColumn& c = columns[i];
      const auto low = static_cast<uint32_t>(c.add);
      float fill;
      std::memcpy(&fill, &low, sizeof fill);
      float* to = out + c.position;
      const bool has_fill = c.seed != 0;
      // Beyond float32, a double becomes an infinity, which counts as wrong. (IEEE 754; so does NumPy.)
      const auto put = [&](int64_t row, auto value) {
        const bool is_null = c.validity != nullptr && !Bit(c.validity, c.offset + row);
        if (is_null || value != value) {  // NaN
          to[row * stride] = has_fill ? fill : 0;
          wrong += !has_fill;
        } else {
          to[row * stride] = static_cast<float>(value);
          wrong += !std::isfinite(to[row * stride]);
        }
      };
      if (c.kind == 132) Each<float>(c, first, last, put);
      else if (c.kind == 164) Each<double>(c, first, last, put);
      else EachInteger(c, first, last, [&](int64_t row, auto value) {
        put(row, static_cast<double>(value));
      });
    }
  }
  return wrong;
}
