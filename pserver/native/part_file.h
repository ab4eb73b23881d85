// A part of a saved table: one shard. A header of 80 bytes, then rows as they lie in memory, then the keys that are gone (in
// a part that holds only what changed). Little-endian. pserver.row_parts reads and writes the same.
#pragma once
#include <fcntl.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include "layout.h"

namespace wheel {

struct PartHeader {
  static constexpr uint64_t kMagic = 0x315357524c485750ull;  // "PWHLRWS1"
  static constexpr uint32_t kHalf = 1, kChanges = 2;
  uint64_t magic = kMagic;
  uint32_t version = 1, row_bytes = 0, width = 0, first_state = 0, embedding_state = 0, flags = 0;
  uint32_t shard = 0, shards = 0;
  uint64_t rows = 0, removed = 0;
  uint32_t days = 0, keys = 0;  // of a part of changes: days since the state that it leads on from; keys that there are now
  uint64_t body_hash = 0, header_hash = 0;  // xxh64 of what follows the header, and of the header before this
};
static_assert(sizeof(PartHeader) == 80);

class Xxh64 {  // Collet's XXH64, seed 0
 public:
  void add(const void* data, size_t bytes) {
    const char* at = static_cast<const char*>(data);
    total_ += bytes;
    if (held_) {
      const size_t some = std::min(bytes, sizeof hold_ - held_);
      std::memcpy(hold_ + held_, at, some);
      held_ += some, at += some, bytes -= some;
      if (held_ < sizeof hold_) return;
      block(hold_);
      held_ = 0;
    }
    for (; bytes >= 32; bytes -= 32, at += 32) block(at);
    std::memcpy(hold_, at, bytes);
    held_ = bytes;
  }
  uint64_t value() const {
    uint64_t h;
    if (total_ >= 32) {
      h = rotate(lane_[0], 1) + rotate(lane_[1], 7) + rotate(lane_[2], 12) + rotate(lane_[3], 18);
      for (const uint64_t lane : lane_) h = (h ^ round(0, lane)) * k1 + k4;
    } else {
      h = k5;
    }
    h += total_;
    const char *at = hold_, *end = hold_ + held_;
    for (; end - at >= 8; at += 8) h = rotate(h ^ round(0, peek<uint64_t>(at)), 27) * k1 + k4;
    if (end - at >= 4) h = rotate(h ^ peek<uint32_t>(at) * k1, 23) * k2 + k3, at += 4;
    for (; at < end; ++at) h = rotate(h ^ uint8_t(*at) * k5, 11) * k1;
    h = (h ^ h >> 33) * k2;
    h = (h ^ h >> 29) * k3;
    return h ^ h >> 32;
  }

 private:
  static constexpr uint64_t k1 = 0x9E3779B185EBCA87ull, k2 = 0xC2B2AE3D27D4EB4Full, k3 = 0x165667B19E3779F9ull,
                            k4 = 0x85EBCA77C2B2AE63ull, k5 = 0x27D4EB2F165667C5ull;
  static uint64_t rotate(uint64_t v, int by) { return v << by | v >> (64 - by); }
  static uint64_t round(uint64_t lane, uint64_t input) { return rotate(lane + input * k2, 31) * k1; }
  void block(const char* at) {
    for (int i = 0; i < 4; ++i) lane_[i] = round(lane_[i], peek<uint64_t>(at + 8 * i));
  }
  uint64_t lane_[4] = {k1 + k2, k2, 0, 0 - k1};
  uint64_t total_ = 0;
  char hold_[32] = {};
  size_t held_ = 0;
};

inline uint64_t header_hash(const PartHeader& header) {
  Xxh64 hash;
  hash.add(&header, sizeof header - sizeof header.header_hash);
  return hash.value();
}

class File {
 public:
  File(const std::string& path, int flags) : path_(path), fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (fd_ < 0) fail("cannot be opened");
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }

  void write(const void* data, size_t bytes) {
    for (const char* at = static_cast<const char*>(data); bytes;) {
      const ssize_t done = ::write(fd_, at, bytes);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail("cannot be written");
      at += done, bytes -= size_t(done);
    }
  }
  void rewind() {
    if (::lseek(fd_, 0, SEEK_SET) < 0) fail("cannot be written");
  }
  void read(void* data, size_t bytes) {
    for (char* at = static_cast<char*>(data); bytes;) {
      const ssize_t done = ::read(fd_, at, bytes);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail("cannot be read");
      if (done == 0) throw std::runtime_error(path_ + " is cut short");
      at += done, bytes -= size_t(done);
    }
  }
  void finish() {  // it has reached the disk
    if (::fsync(fd_)) fail("cannot be written");
    const int fd = fd_;
    fd_ = -1;
    if (::close(fd)) fail("cannot be written");
  }

 private:
  [[noreturn]] void fail(const char* what) const {
    throw std::runtime_error(path_ + " " + what + ": " + std::strerror(errno));
  }
  std::string path_;
  int fd_;
};

}  // namespace wheel
