// Package rpc is a gRPC service with a call of each kind, for the tests' server and
// their client in a sandbox.
package rpc

import (
	"context"
	"errors"
	"io"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Full names of the methods.
const (
	Echo  = "/test.Calls/Echo"  // unary: the text again; "fail" fails with Failure
	Count = "/test.Calls/Count" // a server's stream: 1 to the number that is asked for
	Chat  = "/test.Calls/Chat"  // both stream: each text again, before the next is read
)

// Trailer comes with the end of every call: binary data.
const (
	Trailer      = "x-end-bin"
	TrailerValue = "\x00\xff\n"
)

// Failure is an error with a text that needs to be encoded.
var Failure = status.New(codes.DataLoss, "the end: ö%\n")

// Streams of the service, for grpc.ClientConn.NewStream.
var (
	CountStream = &Service.Streams[0]
	ChatStream  = &Service.Streams[1]
)

// Service is what a grpc.Server registers, without an implementation.
var Service = grpc.ServiceDesc{
	ServiceName: "test.Calls",
	HandlerType: (*any)(nil),
	Methods:     []grpc.MethodDesc{{MethodName: "Echo", Handler: echo}},
	Streams: []grpc.StreamDesc{
		{StreamName: "Count", ServerStreams: true, Handler: count},
		{StreamName: "Chat", ServerStreams: true, ClientStreams: true, Handler: chat},
	},
}

func echo(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	text := new(wrapperspb.StringValue)
	if err := errors.Join(decode(text), grpc.SetTrailer(ctx, metadata.Pairs(Trailer, TrailerValue))); err != nil {
		return nil, err
	}
	if text.Value == "fail" {
		return nil, Failure.Err()
	}
	return text, nil
}

func count(_ any, s grpc.ServerStream) error {
	s.SetTrailer(metadata.Pairs(Trailer, TrailerValue))
	text := new(wrapperspb.StringValue)
	if err := s.RecvMsg(text); err != nil {
		return err
	}
	last, err := strconv.Atoi(text.Value)
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	for i := range last {
		if err := s.SendMsg(wrapperspb.String(strconv.Itoa(i + 1))); err != nil {
			return err
		}
	}
	return nil
}

func chat(_ any, s grpc.ServerStream) error {
	s.SetTrailer(metadata.Pairs(Trailer, TrailerValue))
	for {
		text := new(wrapperspb.StringValue)
		switch err := s.RecvMsg(text); {
		case err == io.EOF:
			return nil
		case err != nil:
			return err
		}
		if err := s.SendMsg(text); err != nil {
			return err
		}
	}
}
