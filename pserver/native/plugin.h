// Our table as a class in the registry of Paddle's server.
#pragma once
#include <string>
#include "layout.h"

namespace wheel {

void register_table(const Options& options);
std::string start_error();

}  // namespace wheel
