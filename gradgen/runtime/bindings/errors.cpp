// C++ errors become the Python classes of gradgen.diagnostics, so that `except gradgen.StateError` works.
#include "bind.h"
#include "gradgen/error.h"

namespace gradgen::bind {

void bind_errors(py::module_&) {
    py::register_exception_translator([](std::exception_ptr pointer) {
        const auto raise = [](const char* name, const char* text) {
            py::set_error(py::module_::import("gradgen.diagnostics").attr(name), text);
        };
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const PeerLost& e) {
            raise("PeerLost", e.what());
        } catch (const CommTimeout& e) {
            raise("CommTimeout", e.what());
        } catch (const MismatchError& e) {
            raise("MismatchError", e.what());
        } catch (const CommError& e) {
            raise("CommError", e.what());
        } catch (const StateError& e) {
            raise("StateError", e.what());
        } catch (const ConfigError& e) {
            raise("ConfigError", e.what());
        } catch (const NonFiniteError& e) {
            raise("NonFiniteError", e.what());
        } catch (const Error& e) {
            raise("Error", e.what());
        }
    });
}

}  // namespace gradgen::bind
