#include "plugin.h"
#include <cstdio>
#include <exception>
#include <map>
#include <mutex>
#include <stdexcept>
#include "paddle_abi.h"
#include "table.h"

namespace wheel {
namespace {

struct Registered {
  Options options;
  bool made = false;
  std::string error;
};
std::mutex registered_mutex;
std::map<uint64_t, Registered> registered;

// Requests of our own client travel in the fields of Paddle's that its tables do not need:
// - pull: the frequency of the first key, which is 1 else;
// - push: a first row of key 0 (padding, never a feature) whose class is a NaN of these bits. Its first float is what it
//   is; then the factor of the learning rate, as the clicks;
// - save, load: words in the free string beside the path.
constexpr uint32_t kStatistics = 0x57480001, kLastError = 0x57480002, kWholeRows = 0x57480100;  // + piece
constexpr uint32_t kPushHeader = 0x7fc05748, kPlainPush = 0, kSetRows = 1;                     // kSetRows + piece

uint32_t bits(float value) {
  uint32_t out;
  std::memcpy(&out, &value, 4);
  return out;
}

// The number of a table: field 1 of a TableParameter.
uint64_t table_number(const std::string& bytes) {
  if (bytes.empty() || bytes[0] != 0x08) throw std::runtime_error("a TableParameter does not begin with its number");
  uint64_t value = 0;
  for (size_t i = 1, shift = 0; i < bytes.size() && shift < 64; ++i, shift += 7) {
    value |= uint64_t(uint8_t(bytes[i]) & 127) << shift;
    if (uint8_t(bytes[i]) < 128) return value;
  }
  throw std::runtime_error("a TableParameter is cut short");
}

std::vector<std::string> words(const std::string& text) {
  std::vector<std::string> found;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    found.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return found;
}

class PluginTable final : public abi::Table {
 public:
  int32_t Initialize(const abi::Message& parameter, const abi::Message&) override {
    uint64_t number = 0;
    try {
      number = table_number(abi::serialize(parameter));
      std::lock_guard<std::mutex> hold(registered_mutex);
      const auto found = registered.find(number);
      if (found == registered.end()) throw std::runtime_error("table " + std::to_string(number) + " was not registered");
      accessor_.reset(abi::make<abi::Accessor>("ValueAccessor", "CtrCommonAccessor"));  // tells the service our sizes
      if (accessor_->Configure(abi::accessor_parameter(parameter)) || accessor_->Initialize())
        throw std::runtime_error("Paddle's accessor does not take its description");
      const Options& o = found->second.options;
      const abi::AccessorInfo info = accessor_->GetAccessorInfo();
      if (info.select_dim != o.width + 3 || info.update_dim != o.width + 4)
        throw std::runtime_error("Paddle's accessor has other widths than the table");
      if (server_ != o.server || num_servers_ != o.servers)
        throw std::runtime_error("this server is another one than its tables were made for");
      table_ = std::make_unique<wheel::Table>(o);
      found->second.made = true;
      return 0;
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> hold(registered_mutex);
      registered[number].error = error.what();
      return -1;  // which Paddle ignores: whoever started the server asks for start_error()
    }
  }

  int32_t Pull(abi::TableContext& c) override {
    return answer("pull", [&] {
      const auto n = size_t(std::max(0, c.pull.numel));
      const uint32_t what = n && c.pull.frequencies ? c.pull.frequencies[0] : 0;
      const size_t floats = table_->pulled_floats();
      if (what == kStatistics || what == kLastError) {
        pull_text(what, c.pull.keys, n, floats, c.pull_values);
      } else if (what >= kWholeRows && what < kWholeRows + 65536) {
        pull_piece(what - kWholeRows, c.pull.keys, n, floats, c.pull_values);
      } else {
        table_->pull(c.pull.keys, n, c.pull_values);
      }
    });
  }

  int32_t Push(abi::TableContext& c) override {
    return answer("push", [&] {
      const uint64_t* keys = c.push_keys;
      const float* values = c.push_values;
      size_t n = c.num;
      float rate = 1;
      const size_t stride = table_->pushed_floats();
      if (n && keys[0] == 0 && bits(values[0]) == kPushHeader) {
        const uint32_t kind = bits(values[1]);
        rate = values[2];
        ++keys, values += stride, --n;
        if (kind >= kSetRows) return set_pieces(kind - kSetRows, keys, values, n, stride);
        if (kind != kPlainPush) throw std::runtime_error("this server does not know that kind of push");
      }
      table_->push(keys, values, n, rate);
    });
  }

  int32_t Shrink(const std::string&) override {
    return answer("day boundary", [&] { table_->end_day(); });
  }

  // param: "0" save now, "3" and advance the day; or "mark ID [day]", "save ID [since ID]", "drop ID".
  int32_t Save(const std::string& path, const std::string& param) override {
    return answer("save", [&] {
      const auto word = words(param);
      if (word[0] == "mark" && word.size() >= 2) {
        table_->mark(word[1], word.size() > 2 && word[2] == "day");
      } else if (word[0] == "save" && word.size() >= 2) {
        table_->save(word[1], make_folder(path), word.size() > 3 ? word[3] : "");
      } else if (word[0] == "drop" && word.size() >= 2) {
        table_->drop(word[1]);
      } else if (param == "0" || param == "3") {
        const std::string folder = make_folder(path);
        table_->mark("now", param == "3");
        table_->save("now", folder);
      } else {
        throw std::runtime_error("this server does not know how to save " + param);
      }
    });
  }

  // param: "0", or "load ID" where the state that it leads to is a mark.
  int32_t Load(const std::string& path, const std::string& param) override {
    return answer("load", [&] {
      const auto word = words(param);
      table_->load(path + folder_name(), word[0] == "load" && word.size() >= 2 ? word[1] : "");
    });
  }

  // Keys, and how our client knows that this is not Paddle's table: the version of the above, negative.
  std::pair<int64_t, int64_t> PrintTableStat() override { return {int64_t(table_->rows()), -1}; }

 private:
  template <class F>
  int32_t answer(const char* what, F&& f) {
    try {
      f();
      return 0;
    } catch (const std::exception& error) {
      std::lock_guard<std::mutex> hold(error_mutex_);
      last_error_ = error.what();
      std::fprintf(stderr, "parameter server: %s of table %llu: %s\n", what, (unsigned long long)table_->options().table, error.what());
    } catch (...) {
      std::fprintf(stderr, "parameter server: %s failed\n", what);
    }
    return -1;
  }

  std::string folder_name() const {
    char name[32];
    std::snprintf(name, sizeof name, "/%03llu", (unsigned long long)table_->options().table);
    return name;
  }

  std::string make_folder(const std::string& path) const {
    const std::string folder = path + folder_name();
    for (size_t end = folder.find('/', 1);; end = folder.find('/', end + 1)) {
      const std::string each = folder.substr(0, end);
      if (mkdir(each.c_str(), 0777) && errno != EEXIST)
        throw std::runtime_error(each + " cannot be made: " + std::strerror(errno));
      if (end == std::string::npos) break;
    }
    return folder;
  }

  // Row i of the answer is word number keys[i] of the statistics, or that 8-byte piece of the last error's text.
  void pull_text(uint32_t what, const uint64_t* keys, size_t n, size_t floats, float* out) {
    uint64_t numbers[256] = {};
    if (what == kStatistics) {
      const Statistics found = table_->statistics();
      std::memcpy(numbers, &found, sizeof found);
    } else {
      std::lock_guard<std::mutex> hold(error_mutex_);
      std::memcpy(numbers, last_error_.data(), std::min(last_error_.size(), sizeof numbers - 1));
    }
    std::memset(out, 0, n * floats * 4);
    for (size_t i = 0; i < n; ++i) std::memcpy(out + i * floats, &numbers[keys[i] % 256], 8);
  }

  // The floats [piece * floats, ...) of each whole row, as many as a pull has.
  void pull_piece(uint32_t piece, const uint64_t* keys, size_t n, size_t floats, float* out) {
    const size_t row_bytes = table_->layout().row_bytes, begin = piece * floats * 4;
    std::vector<char> rows(n * row_bytes);
    table_->get_rows(keys, n, rows.data());
    std::memset(out, 0, n * floats * 4);
    if (begin >= row_bytes) return;
    const size_t bytes = std::min(floats * 4, row_bytes - begin);
    for (size_t i = 0; i < n; ++i) std::memcpy(out + i * floats, rows.data() + i * row_bytes + begin, bytes);
  }

  // Whole rows whose pieces of `stride` floats lie one after the other: `pieces` rows of the push make one, the first of
  // which has the key, the others key 0.
  void set_pieces(uint32_t pieces, const uint64_t* keys, const float* values, size_t n, size_t stride) {
    const size_t row_bytes = table_->layout().row_bytes;
    if (!pieces || n % pieces || pieces * stride * 4 < row_bytes) throw std::runtime_error("whole rows of another size");
    std::vector<char> rows(n / pieces * row_bytes);
    for (size_t i = 0; i < n / pieces; ++i) {
      char* to = rows.data() + i * row_bytes;
      std::memcpy(to, values + i * pieces * stride, row_bytes);
      poke(to, keys[i * pieces]);
    }
    table_->set_rows(rows.data(), n / pieces);
  }

  std::unique_ptr<wheel::Table> table_;
  std::mutex error_mutex_;
  std::string last_error_;
};

struct Factory final : abi::ObjectFactory {
  abi::Any NewInstance() override { return abi::Any(static_cast<abi::Table*>(new PluginTable)); }
};

}  // namespace

void register_table(const Options& options) {
  std::lock_guard<std::mutex> hold(registered_mutex);
  registered[options.table] = {options, false, ""};
  auto& tables = abi::registry()["Table"];
  if (!tables.count("PaddlewheelTable")) tables["PaddlewheelTable"] = new Factory;  // the registry owns it
}

std::string start_error() {
  std::lock_guard<std::mutex> hold(registered_mutex);
  for (const auto& [number, each] : registered) {
    if (!each.error.empty()) return each.error;
    if (!each.made) return "Paddle's server did not make table " + std::to_string(number);
  }
  return "";
}

}  // namespace wheel
