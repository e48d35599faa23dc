package egress

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/doze-run/doze/egress/flow"
	"github.com/doze-run/doze/egress/policy"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/policies/builtin"
)

// CheckPolicies checks, without a node, whether the policies that rules name can run:
// each policy that doze ships must accept its configuration. It returns the names of all
// other policies, which may have been pushed to the node. Errors name the rules. compiler
// is policy.Config.Compiler.
func CheckPolicies(ctx context.Context, s Settings, compiler string) (others []string, err error) {
	host, err := policy.NewHost(policy.Config{Log: slog.New(slog.DiscardHandler), Compiler: compiler, MemoryLimit: int(s.PolicyMemory), TimeLimit: s.PolicyTime})
	if err != nil {
		return nil, err
	}
	defer host.Close()
	e := &Egress{pool: newPool(host, policylog.New())}
	find := func(owner, name string) (module, error) {
		info, err := shipped(name)
		if errors.Is(err, builtin.ErrUnknown) {
			if !slices.Contains(others, name) {
				others = append(others, name)
			}
			return module{}, errPushed
		}
		return module{owner, name, info.Digest, func() ([]byte, error) { return builtin.Module(name) }}, err
	}
	l, err := e.newLayer(ctx, find, "", s.Rules)
	if err != nil {
		return nil, fmt.Errorf("egress: %w", err)
	}
	defer l.Release()
	if err := problemsOf(l, func(u flow.Use) bool { return !errors.Is(l.Unready[u], errPushed) }); err != nil {
		return nil, fmt.Errorf("egress: %w", err)
	}
	return others, nil
}

// errPushed means that doze does not ship a policy of this name. It may have been pushed.
var errPushed = errors.New("not shipped")
