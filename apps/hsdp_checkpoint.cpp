// Looks into checkpoints, checks and compares them, and makes whole models of them:
//   build/release/apps/hsdp_checkpoint verify runs/quickstart/checkpoints

#include <CLI/CLI.hpp>
#include <cstdint>
#include <exception>
#include <iostream>
#include <map>
#include <string>

#include "apps/checkpoint_report.h"
#include "apps/failure.h"

namespace {

/// Of diff, besides 0 for what is equal.
constexpr int kDifferent = 1;

struct Arguments {
  std::string path, other;
  bool tensors = false;
  hsdp::HuggingFaceOptions whole = {};
  std::string dtype;
};

int run(const CLI::App& app, const Arguments& arguments) {
  if (app.got_subcommand("inspect")) apps::inspect(arguments.path, arguments.tensors, std::cout);
  if (app.got_subcommand("verify")) apps::verify(arguments.path, std::cout);
  if (app.got_subcommand("consolidate")) {
    apps::consolidate(arguments.path, arguments.other, arguments.whole, std::cout);
  }
  if (app.got_subcommand("diff") && !apps::diff(arguments.path, arguments.other, std::cout)) return kDifferent;
  return int(apps::ExitCode::success);
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  CLI::App app("Looks into checkpoints of hsdp. A folder of checkpoints stands for the newest complete one in it.",
               "hsdp_checkpoint");
  app.require_subcommand(1);

  const auto inspect = app.add_subcommand("inspect", "Says what is in a checkpoint or a model in safetensors files");
  inspect->add_option("PATH", arguments.path)->required();
  inspect->add_flag("--tensors", arguments.tensors, "list every tensor: name, dtype, shape");

  const auto verify = app.add_subcommand("verify", "Reads all of a checkpoint and compares it with its checksums");
  verify->add_option("PATH", arguments.path)->required();

  const auto consolidate = app.add_subcommand(
      "consolidate", "Makes a folder of whole tensors, as Hugging Face has them, of a checkpoint or such a folder");
  consolidate->add_option("FROM", arguments.path)->required();
  consolidate->add_option("TO", arguments.other)->required();
  consolidate->add_option("--max-file-size", arguments.whole.max_file_bytes, "of each file, such as 5GB or 500MiB")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->check(CLI::PositiveNumber)
      ->default_str("5GB");
  consolidate->add_option("--dtype", arguments.dtype, "of floating-point tensors; their own unless given")
      ->check(CLI::IsMember({"bfloat16", "float16", "float32"}));

  const auto diff = app.add_subcommand("diff",
                                       "Compares two checkpoints or models bit for bit; exits with 1 where "
                                       "they differ, 2 where that cannot be found out");
  diff->add_option("A", arguments.path)->required();
  diff->add_option("B", arguments.other)->required();

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& request) {
    return app.exit(request);
  } catch (const CLI::ParseError& error) {
    std::cerr << "[command line] " << error.what() << "; hsdp_checkpoint --help lists the commands" << std::endl;
    return int(apps::ExitCode::user_mistake);
  }
  const std::map<std::string, c10::ScalarType> dtypes = {
      {"bfloat16", c10::ScalarType::BFloat16}, {"float16", c10::ScalarType::Half}, {"float32", c10::ScalarType::Float}};
  if (!arguments.dtype.empty()) arguments.whole.dtype = dtypes.at(arguments.dtype);
  try {
    return run(app, arguments);
  } catch (...) {
    const auto code = apps::report(std::current_exception(), /*rank=*/0, apps::Teller::each);
    // 1 would mean that they differ.
    return int(app.got_subcommand("diff") ? apps::ExitCode::user_mistake : code);
  }
}
