// Package rpc makes the calls of gRPC's interoperability tests, which are described at
// https://github.com/grpc/grpc/blob/master/doc/interop-test-descriptions.md.
package rpc

import (
	"context"
	"log"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/interop"
	testgrpc "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/status"
)

// Serve registers the service that Calls calls.
func Serve(s *grpc.Server) { testgrpc.RegisterTestServiceServer(s, interop.NewTestServer()) }

// Calls makes a call of each kind, with messages that exceed the initial window of HTTP/2,
// binary trailers and errors. If one fails, it logs the failure and ends the process.
func Calls(ctx context.Context, conn *grpc.ClientConn) {
	client := testgrpc.NewTestServiceClient(conn)
	for _, call := range []func(context.Context, testgrpc.TestServiceClient, ...grpc.CallOption){
		interop.DoEmptyUnaryCall, interop.DoLargeUnaryCall, interop.DoClientStreaming, interop.DoServerStreaming,
		interop.DoPingPong, interop.DoEmptyStream, cancelAfterBegin, interop.DoCancelAfterFirstResponse,
		interop.DoCustomMetadata, interop.DoStatusCodeAndMessage, interop.DoSpecialStatusMessage,
	} {
		call(ctx, client)
	}
	interop.DoUnimplementedMethod(ctx, conn)
}

// cancelAfterBegin is interop.DoCancelAfterBegin without the end of the requests: after it a fast
// server may respond before the client notices that it has canceled.
func cancelAfterBegin(ctx context.Context, client testgrpc.TestServiceClient, options ...grpc.CallOption) {
	ctx, cancel := context.WithCancel(ctx)
	stream, err := client.StreamingInputCall(ctx, options...)
	if err != nil {
		log.Fatalf("StreamingInputCall: %v", err)
	}
	cancel()
	if err := stream.RecvMsg(&testgrpc.StreamingInputCallResponse{}); status.Code(err) != codes.Canceled {
		log.Fatalf("a canceled call: error %v, want %s", err, codes.Canceled)
	}
}
