// Options of a table from text, one "name value..." a line: how Python says them. Numbers are written in any way that
// strtod reads; floats are rounded to float32 here.
#pragma once
#include <functional>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include "layout.h"

namespace wheel {

inline Options parse_options(const std::string& text) {
  Options o;
  std::istringstream lines(text);
  std::string line;
  while (std::getline(lines, line)) {
    if (line.empty()) continue;
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space), value = space == std::string::npos ? "" : line.substr(space + 1);
    const auto real = [&] {
      char* end = nullptr;
      const double number = std::strtod(value.c_str(), &end);
      if (end == value.c_str() || *end) throw std::runtime_error("option " + name + ": " + value + " is not a number");
      return float(number);
    };
    const auto whole = [&] { return std::strtoull(value.c_str(), nullptr, 10); };
    const auto rule = [&](auto set) { set(o.first), set(o.embedding); };
    if (name == "table") o.table = whole();
    else if (name == "width") o.width = uint32_t(whole());
    else if (name == "shards") o.shards = uint32_t(whole());
    else if (name == "server") o.server = uint32_t(whole());
    else if (name == "servers") o.servers = uint32_t(whole());
    else if (name == "rule") rule([&](RuleOptions& r) { r.kind = RuleKind(whole()); });
    else if (name == "learning_rate") rule([&](RuleOptions& r) { r.learning_rate = real(); });
    else if (name == "low") rule([&](RuleOptions& r) { r.low = real(); });
    else if (name == "high") rule([&](RuleOptions& r) { r.high = real(); });
    else if (name == "initial_accumulator") rule([&](RuleOptions& r) { r.initial_accumulator = real(); });
    else if (name == "beta1") rule([&](RuleOptions& r) { r.beta1 = real(); });
    else if (name == "beta2") rule([&](RuleOptions& r) { r.beta2 = real(); });
    else if (name == "epsilon") rule([&](RuleOptions& r) { r.epsilon = real(); });
    else if (name == "unclicked") o.unclicked = real();
    else if (name == "clicked") o.clicked = real();
    else if (name == "admission") {
      o.admission.clear();
      std::istringstream scores(value);
      for (std::string score; scores >> score;) o.admission.push_back(std::strtof(score.c_str(), nullptr));
    }
    else if (name == "decay") o.decay = real();
    else if (name == "delete_below") o.delete_below = real();
    else if (name == "delete_unseen") o.delete_unseen = real();
    else if (name == "half") o.half = whole();
    else if (name == "train_created") o.train_created = whole();
    else if (name == "train_unadmitted") o.train_unadmitted = whole();
    else if (name == "l2") o.l2 = real();
    else if (name == "initial_state") o.initial_state = whole();
    else if (name == "initial_range") o.initial_range = real();
    else if (name == "max_rows") o.max_rows = whole();
    else if (name == "log_removed") o.log_removed = whole();
    else if (name == "threads") o.threads = uint32_t(whole());
    else if (name == "spill") o.spill = value;
    else if (name == "memory") o.memory = whole();
    else if (name == "save_pause_us") o.save_pause_us = uint32_t(whole());
    else throw std::runtime_error("a table has no option " + name);
  }
  return o;
}

}  // namespace wheel
