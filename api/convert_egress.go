package api

import (
	"strings"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/audit"
	"github.com/doze-run/doze/egress/policy/catalog"
	"github.com/doze-run/doze/egress/policy/policylog"
	"github.com/doze-run/doze/egress/rule/explain"
	"github.com/doze-run/doze/egress/secret/vault"
)

func flowOf(e audit.Entry) types.Flow {
	converted := types.Flow{
		Seq:        e.Seq,
		Time:       e.Time,
		Sandbox:    sandboxIDOf(e.Sandbox),
		Flow:       e.Flow,
		Kind:       types.FlowKind(e.Kind),
		Host:       e.Host,
		Port:       e.Port,
		Method:     e.Method,
		Path:       e.Path,
		Rule:       e.Rule,
		Policies:   listOf(e.Policies, func(p audit.Policy) types.FlowPolicy { return types.FlowPolicy(p) }),
		Verdict:    types.Verdict(e.Verdict),
		Reason:     e.Reason,
		Secrets:    e.Secrets,
		Notes:      e.Notes,
		Status:     e.Status,
		BytesOut:   e.BytesOut,
		BytesIn:    e.BytesIn,
		DurationMS: float64(e.Duration),
		Dropped:    e.Dropped,
	}
	if e.Address.IsValid() {
		converted.Address = e.Address.String()
	}
	return converted
}

// sandboxIDOf returns no id for the name of the clients of the proxy, proxy/OWNER.
func sandboxIDOf(name string) string {
	if strings.Contains(name, "/") {
		return ""
	}
	return name
}

func explanationOf(e explain.Explanation) types.Explanation {
	return types.Explanation{
		Verdict:      types.Verdict(e.Verdict),
		Stage:        types.Stage(e.Stage),
		Rule:         e.Rule,
		Reason:       e.Reason,
		Preset:       e.Preset,
		AllowPrivate: e.Private,
		Status:       e.Status,
		Policies: listOf(e.Policies, func(p explain.Policy) types.ExplainedPolicy {
			return types.ExplainedPolicy{Rule: p.Rule, Name: p.Name, Digest: p.Digest, Error: p.Problem}
		}),
		Secrets:      listOf(e.Secrets, explainedSecretOf),
		Placeholders: listOf(e.Placeholders, explainedSecretOf),
	}
}

func explainedSecretOf(s explain.Secret) types.ExplainedSecret {
	return types.ExplainedSecret{Name: s.Name, Error: s.Problem}
}

func secretOf(s vault.Secret) types.Secret {
	return types.Secret{Name: s.Name, Hosts: s.Hosts, Version: s.Version, CreatedAt: s.CreatedAt, UpdatedAt: s.UpdatedAt, Unreadable: s.Unreadable}
}

func policyOf(p catalog.Info) types.Policy {
	return types.Policy{
		Name:            p.Name,
		Digest:          p.Digest,
		Size:            p.Size,
		BuiltIn:         p.BuiltIn,
		UpdatedAt:       p.UpdatedAt,
		UsedBy:          p.UsedBy,
		ReplacesBuiltIn: p.ReplacesBuiltIn,
	}
}

func lineOf(l policylog.Line) types.PolicyLine {
	return types.PolicyLine{
		Seq:         l.Seq,
		Time:        l.Time,
		Level:       types.LogLevel(l.Level),
		Text:        l.Text,
		Flow:        l.Flow,
		Sandbox:     sandboxIDOf(l.Sandbox),
		SandboxName: l.SandboxName,
		Dropped:     l.Dropped,
	}
}
