;; Puts the secret that a rule calls "token" into the header X-Api-Key, in the place
;; of the client's own. Without the secret the request is refused.
(module
  ;; (name, name_len, buf, buf_limit) -> length, or below 0 for a failure
  (import "doze_egress_v1" "secret_ref" (func $secret_ref (param i32 i32 i32 i32) (result i32)))
  ;; (reason, reason_len)
  (import "doze_egress_v1" "deny" (func $deny (param i32 i32)))
  ;; (kind, name, name_len, value, value_len); kind 0 is the request's header
  (import "http_handler" "set_header_value" (func $set_header_value (param i32 i32 i32 i32 i32)))

  (memory (export "memory") 1 1)
  (data (i32.const 0) "token")
  (data (i32.const 16) "X-Api-Key")
  (data (i32.const 32) "the rule gives no secret \"token\"")
  (global $reference i32 (i32.const 128)) ;; of at most 64 bytes

  ;; 1 goes on to the next policy or to the host, 0 does not.
  (func (export "handle_request") (result i64)
    (local $length i32)
    (local.set $length
      (call $secret_ref (i32.const 0) (i32.const 5) (global.get $reference) (i32.const 64)))
    (if (i32.lt_s (local.get $length) (i32.const 0))
      (then
        (call $deny (i32.const 32) (i32.const 32))
        (return (i64.const 0))))
    (call $set_header_value
      (i32.const 0) (i32.const 16) (i32.const 9) (global.get $reference) (local.get $length))
    (i64.const 1))

  ;; Empty: the host sees that, and does not call it.
  (func (export "handle_response") (param $context i32) (param $is_error i32)))
