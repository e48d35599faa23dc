// Loaded before code-server: it requires argon2, a native module that is not
// built here, and uses it only for passwords.
const Module = require("module");

const load = Module._load;
Module._load = function (request, ...rest) {
  return request === "argon2" ? {} : load.call(this, request, ...rest);
};
