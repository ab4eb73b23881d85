// What is taken from libpaddle by name, and the check that it lies where it lay in 2.6.2.
#include "paddle_abi.h"
#include <dlfcn.h>
#include <stdexcept>

namespace wheel::abi {
namespace {
void* lib = nullptr;

void* symbol(const std::string& name) {
  void* found = lib ? dlsym(lib, name.c_str()) : nullptr;
  if (!found) throw std::runtime_error("this libpaddle.so has no " + name);
  return found;
}
template <class F>
F function(const char* name) { return reinterpret_cast<F>(symbol(name)); }

Registry& (*registry_function)();
std::string (*serialize_function)(const Message*);
bool (*parse_function)(Message*, const void*, int);
const Message& (*accessor_function)(const Message*);
Message* (*new_rule_function)(void*);

// Class, slot, function: all slots of a table, and those of other classes that are called. The names are mangled, without
// what they all begin with.
const std::string kPrefix = "_ZN6paddle11distributed";
struct Slot {
  const char* cls;
  size_t slot;
  const char* function;
};
const Slot kSlots[] = {
    {"17CtrCommonAccessor", 2, "13ValueAccessor9ConfigureERKNS0_22TableAccessorParameterE"},
    {"17CtrCommonAccessor", 3, "17CtrCommonAccessor10InitializeEv"},
    {"17CtrCommonAccessor", 4, "13ValueAccessor15GetAccessorInfoEv"},
    {"17MemorySparseTable", 2, "5Table10InitializeERKNS0_14TableParameterERKNS0_17FsClientParameterE"},
    {"17MemorySparseTable", 3, "17MemorySparseTable4PullERNS0_12TableContextE"},
    {"17MemorySparseTable", 4, "17MemorySparseTable4PushERNS0_12TableContextE"},
    {"17MemorySparseTable", 5, "5Table7BarrierEjNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"},
    {"17MemorySparseTable", 6, "5Table11SetTableMapEPSt13unordered_mapIjSt10shared_ptrIS1_ESt4hashIjESt8equal_toIjESaISt4pairIKjS4_EEE"},
    {"17MemorySparseTable", 7, "5Table13SetProgramEnvEPNS_9framework5ScopeEN3phi5PlaceEPKSt6vectorINS2_11ProgramDescESaIS8_EE"},
    {"17MemorySparseTable", 8, "5Table11SetGlobalLREPf"},
    {"17MemorySparseTable", 9, "5Table4PourEv"},
    {"17MemorySparseTable", 10, "17MemorySparseTable5ClearEv"},
    {"17MemorySparseTable", 11, "17MemorySparseTable5FlushEv"},
    {"17MemorySparseTable", 12, "17MemorySparseTable6ShrinkERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"},
    {"17MemorySparseTable", 13, "17MemorySparseTable4LoadERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES9_"},
    {"17MemorySparseTable", 14, "17MemorySparseTable4SaveERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES9_"},
    {"17MemorySparseTable", 15, "17MemorySparseTable9SaveCacheERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES9_RSt10shared_ptrINS_9framework13ChannelObjectISt4pairImS7_EEEE"},
    {"17MemorySparseTable", 16, "17MemorySparseTable12CacheShuffleERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEES9_dSt8functionIFSt6futureIiEiiRS7_EERSt10shared_ptrINS_9framework13ChannelObjectISt4pairImS7_EEEERKSt6vectorIPNS0_5TableESaISQ_EE"},
    {"17MemorySparseTable", 17, "17MemorySparseTable17GetCacheThresholdEv"},
    {"17MemorySparseTable", 18, "5Table8SetShardEmm"},
    {"17MemorySparseTable", 19, "17MemorySparseTable8GetShardEm"},
    {"17MemorySparseTable", 20, "17MemorySparseTable14PrintTableStatEv"},
    {"17MemorySparseTable", 21, "5Table10CacheTableEt"},
    {"17MemorySparseTable", 22, "17MemorySparseTable6RevertEv"},
    {"17MemorySparseTable", 23, "17MemorySparseTable21CheckSavePrePatchDoneEv"},
    {"17MemorySparseTable", 24, "17MemorySparseTable10InitializeEv"},
    {"17MemorySparseTable", 25, "5Table18InitializeAccessorEv"},
    {"17MemorySparseTable", 26, "17MemorySparseTable15InitializeShardEv"},
    {"17MemorySparseTable", 27, "5Table8TableDirERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"},
    {"18SparseNaiveSGDRule", 2, "18SparseNaiveSGDRule10LoadConfigERKNS0_28SparseCommonSGDRuleParameterEm"},
    {"18SparseNaiveSGDRule", 3, "18SparseNaiveSGDRule15UpdateValueWorkEPfS2_PKff"},
    {"18SparseNaiveSGDRule", 4, "18SparseNaiveSGDRule13InitValueWorkEPfS2_b"},
    {"18SparseNaiveSGDRule", 5, "18SparseNaiveSGDRule3DimEv"},
    {"20SparseAdaGradSGDRule", 2, "20SparseAdaGradSGDRule10LoadConfigERKNS0_28SparseCommonSGDRuleParameterEm"},
    {"20SparseAdaGradSGDRule", 3, "20SparseAdaGradSGDRule15UpdateValueWorkEPfS2_PKff"},
    {"20SparseAdaGradSGDRule", 4, "20SparseAdaGradSGDRule13InitValueWorkEPfS2_b"},
    {"20SparseAdaGradSGDRule", 5, "20SparseAdaGradSGDRule3DimEv"},
    {"17StdAdaGradSGDRule", 2, "17StdAdaGradSGDRule10LoadConfigERKNS0_28SparseCommonSGDRuleParameterEm"},
    {"17StdAdaGradSGDRule", 3, "17StdAdaGradSGDRule15UpdateValueWorkEPfS2_PKff"},
    {"17StdAdaGradSGDRule", 4, "17StdAdaGradSGDRule13InitValueWorkEPfS2_b"},
    {"17StdAdaGradSGDRule", 5, "17StdAdaGradSGDRule3DimEv"},
    {"17SparseAdamSGDRule", 2, "17SparseAdamSGDRule10LoadConfigERKNS0_28SparseCommonSGDRuleParameterEm"},
    {"17SparseAdamSGDRule", 3, "17SparseAdamSGDRule15UpdateValueWorkEPfS2_PKff"},
    {"17SparseAdamSGDRule", 4, "17SparseAdamSGDRule13InitValueWorkEPfS2_b"},
    {"17SparseAdamSGDRule", 5, "17SparseAdamSGDRule3DimEv"},
    {"23SparseSharedAdamSGDRule", 2, "23SparseSharedAdamSGDRule10LoadConfigERKNS0_28SparseCommonSGDRuleParameterEm"},
    {"23SparseSharedAdamSGDRule", 3, "23SparseSharedAdamSGDRule15UpdateValueWorkEPfS2_PKff"},
    {"23SparseSharedAdamSGDRule", 4, "23SparseSharedAdamSGDRule13InitValueWorkEPfS2_b"},
    {"23SparseSharedAdamSGDRule", 5, "23SparseSharedAdamSGDRule3DimEv"},
};
}  // namespace

void open(const char* libpaddle) {
  lib = dlopen(libpaddle, RTLD_NOW | RTLD_NOLOAD);  // the one that this process has loaded, never a second one
  if (!lib) throw std::runtime_error(std::string(libpaddle) + " is not loaded in this process");
  registry_function = function<decltype(registry_function)>("global_factory_map");
  serialize_function =
      function<decltype(serialize_function)>("_ZNK6google8protobuf11MessageLite17SerializeAsStringB5cxx11Ev");
  parse_function = function<decltype(parse_function)>("_ZN6google8protobuf11MessageLite14ParseFromArrayEPKvi");
  accessor_function = function<decltype(accessor_function)>(
      "_ZN6paddle11distributed14TableParameter9_Internal8accessorEPKS1_");
  new_rule_function = function<decltype(new_rule_function)>(
      "_ZN6google8protobuf5Arena18CreateMaybeMessageIN6paddle11distributed28SparseCommonSGDRuleParameterEJEEEPT_PS1_DpOT0_");
  for (const Slot& s : kSlots) {
    auto** vtable = static_cast<void**>(symbol("_ZTVN6paddle11distributed" + std::string(s.cls) + "E")) + 2;
    if (vtable[s.slot] != symbol(kPrefix + s.function))
      throw std::runtime_error("slot " + std::to_string(s.slot) + " of " + s.cls + " is not " + s.function +
                               ": this libpaddle.so is not that of Paddle 2.6.2");
  }
}

Registry& registry() { return registry_function(); }
std::string serialize(const Message& message) { return serialize_function(&message); }
const Message& accessor_parameter(const Message& table_parameter) { return accessor_function(&table_parameter); }

std::shared_ptr<const Message> rule_parameter(const std::string& bytes) {
  Message* made = new_rule_function(nullptr);
  // Never freed: its destructor is a slot that is not looked up, and a process makes one for each table.
  if (!made || !parse_function(made, bytes.data(), int(bytes.size())))
    throw std::runtime_error("the description of an update rule cannot be read");
  return {made, [](const Message*) {}};
}

}  // namespace wheel::abi
