// Package abi is the interface between a policy and its host: the http-wasm
// handler ABI (module http_handler) and doze's own functions (module
// doze_egress_v1). In WebAssembly the methods of Node are imports; natively they are the
// methods of the Host that a test has set.
//
// Functions that return text or bytes write them into buf and return their
// length. If the length is more than len(buf), nothing was written.
package abi

// Kinds of header.
const (
	RequestHeader uint32 = iota
	ResponseHeader
	RequestTrailer
	ResponseTrailer
)

// Kinds of body.
const (
	RequestBody uint32 = iota
	ResponseBody
)

// Features that EnableFeatures enables.
const (
	BufferRequest uint32 = 1 << iota
	BufferResponse
	Trailers
	// RequestOnly is doze's own: HandleResponse does nothing, so the instance is
	// free as soon as HandleRequest returns.
	RequestOnly uint32 = 1 << 16
)

// Levels of Log.
const (
	Debug int32 = iota - 1
	Info
	Warn
	Error
)

// Error codes that functions of doze_egress_v1 return instead of a length.
const (
	NotFound    int32 = -1
	NotAllowed  int32 = -2
	BadArgument int32 = -3
	LimitHit    int32 = -4
)

// Encodings of EncodeRef.
const (
	Base64 uint32 = iota
	Base64URL
	Hex
	Percent
)

// Algorithms of Sign.
const (
	RS256 uint32 = iota + 1
	EdDSA
	ES256
)

// Next is the result of HandleRequest that forwards the request.
const Next uint64 = 1

// EOF is the bit that ReadBody sets in its result at the end of the body.
const EOF uint64 = 1 << 32
