// What a plug-in needs of the ABI of Paddle 2.6.2's parameter server: declarations of our own in a namespace of our own. No
// symbol of Paddle is emitted or needed when this is linked; what is used is looked up by name in the library that the
// process has loaded already, and every slot that matters is compared with where it was in 2.6.2.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

namespace wheel::abi {

class Message;  // a google::protobuf::Message of libpaddle, never looked into from here

// ---- the registry of classes by base and name: extern "C" global_factory_map()
class Any {  // paddle's own, minimal: a pointer to a holder with three virtual functions
 public:
  struct PlaceHolder {
    virtual ~PlaceHolder() = default;
    virtual PlaceHolder* clone() const = 0;
  };
  template <class T>
  struct Holder final : PlaceHolder {
    explicit Holder(T v) : held(v) {}
    PlaceHolder* clone() const override { return new Holder(held); }
    T held;
  };
  Any() = default;
  template <class T>
  explicit Any(T* object) : content_(new Holder<T*>(object)) {}
  Any(const Any& other) : content_(other.content_ ? other.content_->clone() : nullptr) {}
  Any& operator=(const Any&) = delete;
  ~Any() { delete content_; }
  template <class T>
  T* held() const { return content_ ? static_cast<Holder<T*>*>(content_)->held : nullptr; }

 private:
  PlaceHolder* content_ = nullptr;
};

struct ObjectFactory {
  virtual ~ObjectFactory() = default;
  virtual Any NewInstance() = 0;
};
using Factories = std::map<std::string, ObjectFactory*>;
using Registry = std::map<std::string, Factories>;

// ---- objects that Paddle makes and we call: the first slots of their vtables
struct AccessorInfo {
  size_t dim, size, select_dim, select_size, update_dim, update_size, mf_size, fea_dim;
};
class Accessor {  // ValueAccessor
 public:
  virtual ~Accessor() = default;                   // 0, 1
  virtual int Configure(const Message&) = 0;       // 2
  virtual int Initialize() = 0;                    // 3
  virtual AccessorInfo GetAccessorInfo() = 0;      // 4
};
class SgdRule {  // SparseValueSGDRule
 public:
  virtual ~SgdRule() = default;                                                           // 0, 1
  virtual void LoadConfig(const Message&, size_t width) = 0;                              // 2
  virtual void UpdateValueWork(float* w, float* state, const float* grad, float scale) = 0;  // 3
  virtual void InitValueWork(float* w, float* state, bool zero) = 0;                      // 4
  virtual size_t Dim() = 0;                                                               // 5
};

// ---- objects that we make and Paddle calls
struct TableContext {
  int value_type;  // 0 sparse
  const uint64_t* unused;
  struct {
    int numel, dim;
    bool is_training;
    const uint64_t* keys;
    const uint32_t* frequencies;
  } pull;
  float* pull_values;
  char** pull_pointers;
  void *geo_keys, *geo_values;
  const uint64_t* push_keys;
  const float* push_values;
  const float** push_pointers;
  const int64_t* push_steps;
  bool push_is_param;
  size_t num;
  bool use_ptr;
  uint32_t trainer;
  int shard;
  uint16_t pass;
};
static_assert(offsetof(TableContext, pull) == 0x10 && offsetof(TableContext, pull.keys) == 0x20);
static_assert(offsetof(TableContext, pull.frequencies) == 0x28 && offsetof(TableContext, pull_values) == 0x30);
static_assert(offsetof(TableContext, push_keys) == 0x50 && offsetof(TableContext, push_values) == 0x58);
static_assert(offsetof(TableContext, num) == 0x78 && offsetof(TableContext, use_ptr) == 0x80);

class Table {  // the 28 slots of paddle::distributed::Table
 public:
  virtual ~Table() = default;                                                          // 0, 1
  virtual int32_t Initialize(const Message& parameter, const Message& fs) = 0;         // 2
  virtual int32_t Pull(TableContext&) = 0;                                             // 3, whose result nobody looks at
  virtual int32_t Push(TableContext&) = 0;                                             // 4
  virtual int32_t Barrier(uint32_t, std::string) { return 0; }                         // 5
  virtual int32_t SetTableMap(void*) { return 0; }                                     // 6
  virtual int32_t SetProgramEnv(void*, void*, const void*) { return 0; }               // 7
  virtual int32_t SetGlobalLR(float*) { return 0; }                                    // 8
  virtual int32_t Pour() { return 0; }                                                 // 9
  virtual void Clear() {}                                                              // 10
  virtual int32_t Flush() { return 0; }                                                // 11
  virtual int32_t Shrink(const std::string& param) = 0;                                // 12
  virtual int32_t Load(const std::string& path, const std::string& param) = 0;         // 13
  virtual int32_t Save(const std::string& path, const std::string& param) = 0;         // 14
  virtual int32_t SaveCache(const std::string&, const std::string&, void*) { return 0; }  // 15
  virtual int64_t CacheShuffle(const std::string&, const std::string&, double, void*, void*, const void*) { return 0; }
  virtual double GetCacheThreshold() { return 0; }                                     // 17
  virtual int32_t SetShard(size_t index, size_t count) {                               // 18
    server_ = index, num_servers_ = count;
    return 0;
  }
  virtual void* GetShard(size_t) { return nullptr; }                                   // 19
  virtual std::pair<int64_t, int64_t> PrintTableStat() = 0;                            // 20
  virtual int32_t CacheTable(uint16_t) { return 0; }                                   // 21
  virtual void Revert() {}                                                             // 22
  virtual void CheckSavePrePatchDone() {}                                              // 23
  virtual int32_t InitializeItself() { return 0; }                                     // 24
  virtual int32_t InitializeAccessor() { return 0; }                                   // 25
  virtual int32_t InitializeShard() { return 0; }                                      // 26
  virtual std::string TableDir(const std::string& folder) { return folder; }           // 27

 protected:
  size_t server_ = 0, num_servers_ = 1;  // 0x08, 0x10
  char unused_parameter_[0x70] = {};     // 0x18
  float* unused_rate_ = nullptr;         // 0x88
  std::shared_ptr<Accessor> accessor_;   // 0x90: read by the service's PullSparse and PushSparse, not through a slot
  void* unused_fs_ = nullptr;            // 0xa0
  friend struct TableCheck;
};
struct TableCheck {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  static_assert(sizeof(Table) == 0xa8 && offsetof(Table, server_) == 0x08 && offsetof(Table, accessor_) == 0x90);
#pragma GCC diagnostic pop
};

// ---- what is taken from libpaddle. Everything here throws std::runtime_error with what is missing or elsewhere.
void open(const char* libpaddle);  // must be loaded already; compares every slot
Registry& registry();
template <class T>
T* make(const char* base, const std::string& name) {
  auto& factories = registry()[base];
  const auto found = factories.find(name);
  T* made = found == factories.end() ? nullptr : found->second->NewInstance().held<T>();
  if (!made) throw std::runtime_error(std::string("Paddle has no ") + base + " named " + name);
  return made;
}
std::string serialize(const Message&);
const Message& accessor_parameter(const Message& table_parameter);
std::shared_ptr<const Message> rule_parameter(const std::string& bytes);  // a SparseCommonSGDRuleParameter

}  // namespace wheel::abi
