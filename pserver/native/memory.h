// Memory in units of one size, from the system in regions: given back unit by unit, so that a table that has shrunk takes
// less. Either anonymous memory, or a file on a local disk whose blocks are reserved before they are used: a full disk is
// then an exception here, and never a fault at some later write.
#pragma once
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace wheel {

class Units {
 public:
  Units() = default;
  Units(const Units&) = delete;
  Units& operator=(const Units&) = delete;
  ~Units() {
    for (const Region& region : regions_) munmap(region.at, region.bytes);
    if (file_ >= 0) ::close(file_);
  }

  // unit_bytes: a multiple of a page, at most a region. spill: folder for the file; empty: memory.
  void set(size_t unit_bytes, const std::string& spill) {
    unit_ = (unit_bytes + kPage - 1) / kPage * kPage;
    region_ = spill.empty() ? kRegion : kFileRegion;
    region_ = std::max(region_, unit_);
    if (spill.empty()) return;
    std::string name = spill + "/paddlewheel-rows-XXXXXX";
    file_ = ::mkostemp(name.data(), O_CLOEXEC);
    if (file_ < 0) throw std::runtime_error("spill: no file can be made in " + spill + ": " + std::strerror(errno));
    ::posix_fadvise(file_, 0, 0, POSIX_FADV_RANDOM);
    ::unlink(name.c_str());  // it goes with the process, however that ends
  }

  char* get() {  // zeros
    std::lock_guard<std::mutex> hold(mutex_);
    if (!free_.empty()) {
      char* unit = free_.back();
      if (file_ >= 0) reserve(offset_of(unit), unit_);
      free_.pop_back();
      ++used_;
      return unit;
    }
    if (left_ < unit_) {
      at_ = map_region();
      left_ = region_;
    }
    if (file_ >= 0) reserve(offset_of(at_), unit_);
    char* unit = at_;
    at_ += unit_, left_ -= unit_;
    ++used_;
    return unit;
  }

  void put(char* unit) noexcept {  // its memory goes back to the system, its addresses are kept for later
    std::lock_guard<std::mutex> hold(mutex_);
    if (file_ >= 0) {
      if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_of(unit), off_t(unit_)))
        std::memset(unit, 0, unit_);
    } else if (madvise(unit, unit_, MADV_DONTNEED)) {
      std::memset(unit, 0, unit_);
    }
    --used_;
    free_.push_back(unit);
  }

  // Of a file, past the pages that are mapped.
  void read(char* to, size_t bytes, off_t offset) const {
    transfer("read", bytes, [&](size_t done) { return ::pread(file_, to + done, bytes - done, offset + off_t(done)); });
  }
  void write(const char* from, size_t bytes, off_t offset) const {
    transfer("written", bytes, [&](size_t done) { return ::pwrite(file_, from + done, bytes - done, offset + off_t(done)); });
  }
  void advise(off_t offset, size_t bytes) const { ::posix_fadvise(file_, offset, off_t(bytes), POSIX_FADV_WILLNEED); }
  off_t offset(const char* unit) {  // of it in the file
    std::lock_guard<std::mutex> hold(mutex_);
    return offset_of(unit);
  }

  size_t bytes() const { return used_.load(std::memory_order_relaxed) * unit_; }

 private:
  static constexpr size_t kPage = 4096, kRegion = size_t(8) << 20, kFileRegion = size_t(256) << 20;
  struct Region {
    char* at;
    size_t bytes;
    off_t offset;
  };

  char* map_region() {
    regions_.reserve(regions_.size() + 1);
    free_.reserve((regions_.size() + 1) * (region_ / unit_));  // `put` must not fail
    void* at = MAP_FAILED;
    if (file_ >= 0) {
      if (::ftruncate(file_, file_bytes_ + off_t(region_)))
        throw std::runtime_error(std::string("spill: the file cannot grow: ") + std::strerror(errno));
      at = mmap(nullptr, region_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, file_bytes_);
    } else {
      at = mmap(nullptr, region_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    if (at == MAP_FAILED) throw std::runtime_error(std::string("no memory for rows: ") + std::strerror(errno));
    madvise(at, region_, file_ >= 0 ? MADV_RANDOM : MADV_HUGEPAGE);
    regions_.push_back({static_cast<char*>(at), region_, file_bytes_});
    if (file_ >= 0) file_bytes_ += off_t(region_);
    return static_cast<char*>(at);
  }

  template <class F>
  static void transfer(const char* what, size_t bytes, F&& some) {
    for (size_t done = 0; done < bytes;) {
      const ssize_t more = some(done);
      if (more < 0 && errno == EINTR) continue;
      if (more <= 0) throw std::runtime_error(std::string("spill: the file cannot be ") + what + ": " + std::strerror(more ? errno : EIO));
      done += size_t(more);
    }
  }

  off_t offset_of(const char* unit) const {
    for (const Region& region : regions_)
      if (unit >= region.at && unit < region.at + region.bytes) return region.offset + (unit - region.at);
    return 0;
  }

  void reserve(off_t offset, size_t bytes) {
    const int error = posix_fallocate(file_, offset, off_t(bytes));
    if (error) throw std::runtime_error(std::string("spill: no room on the disk for more rows: ") + std::strerror(error));
  }

  std::mutex mutex_;
  std::vector<Region> regions_;
  std::vector<char*> free_;
  char* at_ = nullptr;
  size_t left_ = 0, unit_ = 0, region_ = kRegion;
  std::atomic<size_t> used_{0};
  int file_ = -1;
  off_t file_bytes_ = 0;
};

}  // namespace wheel
