package main

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/doze-run/doze/test/egress/rpc"
)

// calls makes a call of each kind to a server of package rpc.
func calls(ctx context.Context, server string) error {
	c, err := grpc.NewClient("dns:///"+server, grpc.WithTransportCredentials(credentials.NewTLS(nil)))
	if err != nil {
		return err
	}
	defer c.Close()
	for name, call := range map[string]func(context.Context, *grpc.ClientConn) error{
		"echo": echo, "failure": failure, "unknown method": unknown, "count": count, "chat": chat, "end by the client": canceled,
	} {
		if err := call(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// trailed checks that a call ended with the trailer.
func trailed(trailer metadata.MD) error {
	if got := trailer.Get(rpc.Trailer); len(got) != 1 || got[0] != rpc.TrailerValue {
		return fmt.Errorf("the trailers are %q", trailer)
	}
	return nil
}

func echo(ctx context.Context, c *grpc.ClientConn) error {
	text, trailer := new(wrapperspb.StringValue), metadata.MD{}
	// More than HTTP/2's window at first, so that flow control is needed.
	want := strings.Repeat("0123456789", 100_000)
	if err := c.Invoke(ctx, rpc.Echo, wrapperspb.String(want), text, grpc.Trailer(&trailer)); err != nil {
		return err
	}
	if text.Value != want {
		return fmt.Errorf("%d bytes came back as %d", len(want), len(text.Value))
	}
	return trailed(trailer)
}

func failure(ctx context.Context, c *grpc.ClientConn) error {
	trailer := metadata.MD{}
	err := c.Invoke(ctx, rpc.Echo, wrapperspb.String("fail"), new(wrapperspb.StringValue), grpc.Trailer(&trailer))
	if s := status.Convert(err); s.Code() != rpc.Failure.Code() || s.Message() != rpc.Failure.Message() {
		return fmt.Errorf("it failed with %w", err)
	}
	return trailed(trailer)
}

func unknown(ctx context.Context, c *grpc.ClientConn) error {
	err := c.Invoke(ctx, "/test.Calls/None", wrapperspb.String(""), new(wrapperspb.StringValue))
	if status.Code(err) != codes.Unimplemented {
		return fmt.Errorf("it failed with %w", err)
	}
	return nil
}

func count(ctx context.Context, c *grpc.ClientConn) error {
	const last = 1000
	s, err := c.NewStream(ctx, rpc.CountStream, rpc.Count)
	if err != nil {
		return err
	}
	if err := s.SendMsg(wrapperspb.String(strconv.Itoa(last))); err != nil {
		return err
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	for i := range last {
		text := new(wrapperspb.StringValue)
		if err := s.RecvMsg(text); err != nil || text.Value != strconv.Itoa(i+1) {
			return fmt.Errorf("after %d came %q: %w", i, text.Value, err)
		}
	}
	if err := s.RecvMsg(new(wrapperspb.StringValue)); err != io.EOF {
		return fmt.Errorf("it ended with %w", err)
	}
	return trailed(s.Trailer())
}

func chat(ctx context.Context, c *grpc.ClientConn) error {
	s, err := c.NewStream(ctx, rpc.ChatStream, rpc.Chat)
	if err != nil {
		return err
	}
	// Each waits for the response to the previous one.
	for _, want := range []string{"one", "", "three"} {
		if err := s.SendMsg(wrapperspb.String(want)); err != nil {
			return err
		}
		text := new(wrapperspb.StringValue)
		if err := s.RecvMsg(text); err != nil || text.Value != want {
			return fmt.Errorf("%q came back as %q: %w", want, text.Value, err)
		}
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	if err := s.RecvMsg(new(wrapperspb.StringValue)); err != io.EOF {
		return fmt.Errorf("it ended with %w", err)
	}
	return trailed(s.Trailer())
}

// canceled cancels a call, which affects no other on the same connection.
func canceled(ctx context.Context, c *grpc.ClientConn) error {
	left, leave := context.WithCancel(ctx)
	s, err := c.NewStream(left, rpc.ChatStream, rpc.Chat)
	if err != nil {
		leave()
		return err
	}
	err = s.SendMsg(wrapperspb.String("hello"))
	leave()
	if err != nil {
		return err
	}
	if err := s.RecvMsg(new(wrapperspb.StringValue)); status.Code(err) != codes.Canceled && err != nil {
		return fmt.Errorf("it ended with %w", err)
	}
	return chat(ctx, c)
}
