package api

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/doze-run/doze/api/types"
	"github.com/doze-run/doze/egress/rule"
	"github.com/doze-run/doze/egress/rule/ruleset"
	"github.com/doze-run/doze/problem"
	"github.com/doze-run/doze/runtime/sandbox"
)

type presetsOutput struct {
	Body types.PresetList
}

type nodeRulesOutput struct {
	Body types.NodeRules
}

type rulesOutput struct {
	ETag string `header:"ETag"`
	Body types.RuleSet
}

type setSandboxRulesInput struct {
	SandboxPath
	RulesCondition
}

// RulesCondition is the part of a request's input that says which rules it knows.
type RulesCondition struct {
	IfMatch string `header:"If-Match" maxLength:"64" doc:"The ETag of the rules that are to be replaced; 412 when they are others"`
}

func (a *API) registerRules() {
	const described = "Applies to the next request of each sandbox, whether it runs or not. Rules that cannot work change nothing. " +
		"Send the ETag as If-Match to replace only what you have seen."
	codes := []problem.Code{problem.RulesInvalid, problem.RevisionConflict, problem.NodeDiskFull}
	register(a, route{
		method: http.MethodGet, path: "/node/egress/rules", id: "get-node-rules", tag: "egress",
		summary: "The rules of the node", description: "They stand before all others. Only the node's Caddyfile changes them.",
	}, a.nodeRules)
	register(a, route{
		method: http.MethodGet, path: "/egress/presets", id: "list-presets", tag: "egress",
		summary: "The presets", description: "Named lists of hosts for rules: `preset:github` among a rule's hosts. Some come with doze, others are defined by the node's operator.",
	}, a.presets)
	register(a, route{
		method: http.MethodGet, path: "/egress/rules", id: "get-rules", tag: "egress",
		summary: "Your rules, for all of your sandboxes", description: "They apply after the node's. Its ETag is for replacing them.",
	}, func(ctx context.Context, _ *struct{}) (*rulesOutput, error) { return a.rules(ctx, "") })
	registerBody(a, route{
		method: http.MethodPut, path: "/egress/rules", id: "set-rules", tag: "egress",
		summary: "Replace your rules", description: described, codes: codes,
	}, func(ctx context.Context, in *RulesCondition, body *types.SetRulesRequest) (*rulesOutput, error) {
		return a.setRules(ctx, "", body, in.IfMatch)
	})
	register(a, route{
		method: http.MethodGet, path: "/sandbox/{id}/egress/rules", id: "get-sandbox-rules", tag: "egress",
		summary: "The rules of a sandbox", description: "Those of its own, which stand after the node's and yours. Wakes nothing.",
		codes: onSandbox(),
	}, func(ctx context.Context, in *SandboxPath) (*rulesOutput, error) {
		sb, err := a.lookup(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		return a.rules(ctx, sb.ID)
	})
	registerBody(a, route{
		method: http.MethodPut, path: "/sandbox/{id}/egress/rules", id: "set-sandbox-rules", tag: "egress",
		summary: "Replace the rules of a sandbox", description: described + " Wakes nothing.", codes: onSandbox(codes),
	}, func(ctx context.Context, in *setSandboxRulesInput, body *types.SetRulesRequest) (*rulesOutput, error) {
		sb, err := a.lookup(ctx, in.ID)
		if err != nil {
			return nil, err
		}
		return a.setRules(ctx, sb.ID, body, in.IfMatch)
	})
}

func (a *API) presets(context.Context, *struct{}) (*presetsOutput, error) {
	return &presetsOutput{Body: types.PresetList{Presets: presetsOf(a.egress.Presets())}}, nil
}

func (a *API) nodeRules(context.Context, *struct{}) (*nodeRulesOutput, error) {
	def, rules := a.egress.NodeRules()
	return &nodeRulesOutput{Body: types.NodeRules{Default: types.RuleDefault(def), Rules: RulesTo(rules)}}, nil
}

// rules answers with the rules of a sandbox, or with an empty id with the owner's.
func (a *API) rules(ctx context.Context, id sandbox.ID) (*rulesOutput, error) {
	set, warnings, err := a.egress.Rules(ctx, ownerOf(ctx), id)
	if err != nil {
		return nil, err
	}
	return newRulesOutput(set, warnings), nil
}

func (a *API) setRules(ctx context.Context, id sandbox.ID, body *types.SetRulesRequest, ifMatch string) (*rulesOutput, error) {
	revision, err := parseRevision(ifMatch)
	if err != nil {
		return nil, err
	}
	rules, err := RulesOf(body.Rules)
	if err != nil {
		return nil, err
	}
	set, warnings, err := a.egress.SetRules(ctx, ownerOf(ctx), id, ruleset.Update{Default: rule.Default(body.Default), Rules: rules, IfRevision: revision})
	if err != nil {
		return nil, err
	}
	return newRulesOutput(set, warnings), nil
}

func newRulesOutput(set ruleset.Set, warnings []rule.Warning) *rulesOutput {
	return &rulesOutput{ETag: strconv.Quote(strconv.FormatInt(set.Revision, 10)), Body: ruleSetOf(set, warnings)}
}

// parseRevision reads an If-Match (RFC 9110, section 13.1.1): none or * is any
// revision. What is no ETag of ours is an error.
func parseRevision(ifMatch string) (*int64, error) {
	ifMatch = strings.TrimSpace(ifMatch)
	if ifMatch == "" || ifMatch == "*" {
		return nil, nil
	}
	text, quoted := strings.CutPrefix(ifMatch, `"`)
	text, closed := strings.CutSuffix(text, `"`)
	revision, err := strconv.ParseInt(text, 10, 64)
	if !quoted || !closed || err != nil || revision < 0 {
		return nil, invalid("header.If-Match", clip(ifMatch)+" is no ETag of rules", `send the ETag that came with them, such as "7" with its quotes`)
	}
	return &revision, nil
}

// problemOfRules lists what is wrong with rules, each where it is.
func problemOfRules(err error) *problem.Problem {
	var faults []problem.FieldError
	var first *rule.Error
	total := 0
	for _, e := range flatten(err) {
		fault, ok := e.(*rule.Error)
		if !ok {
			continue
		}
		if total++; total == 1 {
			first = fault
		}
		if total <= maxFaults {
			faults = append(faults, problem.FieldError{Location: fmt.Sprintf("body.rules[%d].%s", fault.Index, fault.Field), Message: fault.Problem})
		}
	}
	detail := first.Error()
	if total > 1 {
		detail += fmt.Sprintf("; and %d more", total-1)
	}
	p := problem.New(problem.RulesInvalid, detail)
	p.Errors = faults
	return p
}

// flatten returns the errors that were joined, however they were wrapped.
func flatten(err error) []error {
	switch e := err.(type) {
	case *rule.Error:
		return []error{e}
	case interface{ Unwrap() []error }:
		var all []error
		for _, one := range e.Unwrap() {
			all = append(all, flatten(one)...)
		}
		return all
	case interface{ Unwrap() error }:
		return flatten(e.Unwrap())
	}
	return nil
}
