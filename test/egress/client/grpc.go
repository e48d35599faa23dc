package main

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"github.com/doze-run/doze/test/egress/rpc"
)

// calls makes gRPC calls of each kind.
func calls(ctx context.Context, args []string) error {
	c, err := grpc.NewClient("dns:///"+args[0], grpc.WithTransportCredentials(credentials.NewTLS(nil)))
	if err != nil {
		return err
	}
	defer c.Close()
	rpc.Calls(ctx, c)
	return nil
}
