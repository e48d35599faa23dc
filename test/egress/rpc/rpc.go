// Package rpc makes the calls of gRPC's interoperability tests, which are described at
// https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md.
package rpc

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
)

// Serve registers the service that Calls calls.
func Serve(s *grpc.Server) { testgrpc.RegisterTestServiceServer(s, interop.NewTestServer()) }

// Calls makes a call of each kind, with messages that exceed the initial window of HTTP/2,
// binary trailers and errors. If one fails, it logs the failure and ends the process.
func Calls(ctx context.Context, conn *grpc.ClientConn) {
	client := testgrpc.NewTestServiceClient(conn)
	for _, call := range []func(context.Context, testgrpc.TestServiceClient, ...grpc.CallOption){
		interop.DoEmptyUnaryCall, interop.DoLargeUnaryCall, interop.DoClientStreaming, interop.DoServerStreaming,
		interop.DoPingPong, interop.DoEmptyStream, interop.DoCancelAfterBegin, interop.DoCancelAfterFirstResponse,
		interop.DoCustomMetadata, interop.DoStatusCodeAndMessage, interop.DoSpecialStatusMessage,
	} {
		call(ctx, client)
	}
	interop.DoUnimplementedMethod(ctx, conn)
}
