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
// Build the module with
//
//	GOOS=wasip1 GOARCH=wasm go build -buildmode=c-shared -o policy.wasm
//
// or with `doze policy build`, which does the same. Package sdktest runs the same program
// natively, for plain `go test`.
//
// A policy never holds a secret. [Secret] returns a reference: text that the node
// replaces after the policy has finished, and only in requests to hosts to which the
// secret is bound. References can be put into headers, the path, the query and
// the body, and are worthless after the exchange.
//
// An instance of a module serves one exchange at a time, so package variables need
// no lock. A policy has many instances, which do not share variables: store counters
// and state with [KVAdd] and [KVSet]. One instance may serve several rules with the
// same configuration, whose hosts and secrets differ: do not store anything that
// derives from a secret.
package sdk
