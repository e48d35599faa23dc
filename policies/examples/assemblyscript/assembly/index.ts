// Puts the secret that a rule calls "token" into the header X-Api-Key, in the place
// of the client's own. Without the secret the request is refused.

// Lengths that are above the limit mean that nothing was written; those below 0 are
// failures.
// @ts-ignore: decorator
@external("doze_egress_v1", "secret_ref")
declare function secret_ref(name: usize, nameLength: i32, buffer: usize, limit: i32): i32;

// @ts-ignore: decorator
@external("doze_egress_v1", "deny")
declare function host_deny(reason: usize, length: i32): void;

// @ts-ignore: decorator
@external("http_handler", "set_header_value")
declare function set_header_value(kind: i32, name: usize, nameLength: i32, value: usize, valueLength: i32): void;

const requestHeader: i32 = 0;

// Text is UTF-8 that the host can read. All of it is made at the start: requests allocate
// nothing, and this program has no collector.
class Text {
  private bytes: ArrayBuffer;
  constructor(text: string) {
    this.bytes = String.UTF8.encode(text);
  }
  get at(): usize {
    return changetype<usize>(this.bytes);
  }
  get length(): i32 {
    return this.bytes.byteLength;
  }
}

const token = new Text("token");
const header = new Text("X-Api-Key");
const refusal = new Text('the rule gives no secret "token"');
const reference = new ArrayBuffer(64); // the longest that there are

// 1 goes on to the next policy or to the host, 0 does not.
export function handle_request(): i64 {
  const length = secret_ref(token.at, token.length, changetype<usize>(reference), reference.byteLength);
  if (length < 0) {
    host_deny(refusal.at, refusal.length);
    return 0;
  }
  set_header_value(requestHeader, header.at, header.length, changetype<usize>(reference), length);
  return 1;
}

export function handle_response(context: i32, isError: i32): void {}
