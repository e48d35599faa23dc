// Package sdk is for writing policies of doze in Go: programs that see each
// request of a sandbox, and change it, refuse it or respond to it.
//
//	package main
//
//	import "github.com/doze-run/doze/policies/sdk"
//
//	type config struct {
//		Scheme string `json:"scheme"`
//	}
//
//	func init() {
//		sdk.Serve(func(c config) (sdk.Policy, error) {
//			return sdk.Policy{Request: func(r *sdk.Request) error {
//				token, err := sdk.Secret("token")
//				if err != nil {
//					return err // the request is refused, with this reason
//				}
//				r.Header.Set("Authorization", c.Scheme+" "+token)
//				return nil // the request goes on
//			}}, nil
//		})
//	}
//
//	func main() {}
//
// It becomes a module by
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -o policy.wasm
//
// which `doze policy build` does. Package sdktest runs the same program natively,
// for plain `go test`.
//
// A policy never holds a secret. [Secret] gives a reference: text that the node
// replaces after the policy has finished, and only on its way to a host that the
// secret is bound to. A reference can be put into headers, the path, the query and
// the body, and is worth nothing after the exchange.
//
// An instance of a module serves one exchange at a time, so package variables need
// no lock. They are not shared between the many instances of a policy: counters and
// state belong in [KVAdd] and [KVSet]. One instance may
// serve several rules with the same configuration, whose hosts and secrets differ:
// keep nothing that was made from a secret.
package sdk
