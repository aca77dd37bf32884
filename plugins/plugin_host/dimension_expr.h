// The host's own symbolic dimensions: what TensorRT hands to getOutputShapes, evaluated once the real shapes are known.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "../interface/NvInferPluginV3.h"

namespace plugin_host {

using nvinfer1::DimensionOperation;

// A constant, the d-th dimension of an input, or an operation on two expressions.
class DimensionExpr final : public nvinfer1::IDimensionExpr, private nvinfer1::apiv::VDimensionExpr {
 public:
    enum class Kind { kConstant, kInput, kOperation };

    static std::unique_ptr<DimensionExpr> constant(int64_t value) {
        std::unique_ptr<DimensionExpr> expr(new DimensionExpr(Kind::kConstant));
        expr->value_ = value;
        return expr;
    }
    static std::unique_ptr<DimensionExpr> input(int32_t input, int32_t dimension) {
        std::unique_ptr<DimensionExpr> expr(new DimensionExpr(Kind::kInput));
        expr->input_ = input;
        expr->dimension_ = dimension;
        return expr;
    }
    static std::unique_ptr<DimensionExpr> operation(DimensionOperation op, DimensionExpr const& first,
                                                    DimensionExpr const& second) {
        std::unique_ptr<DimensionExpr> expr(new DimensionExpr(Kind::kOperation));
        expr->op_ = op;
        expr->first_ = &first;
        expr->second_ = &second;
        return expr;
    }

    int64_t evaluate(nvinfer1::Dims const* inputs) const {
        switch (kind_) {
            case Kind::kConstant:
                return value_;
            case Kind::kInput:
                return inputs[input_].d[dimension_];
            case Kind::kOperation:
                return apply(first_->evaluate(inputs), second_->evaluate(inputs));
        }
        throw std::logic_error("unknown kind of dimension expression");
    }

 private:
    explicit DimensionExpr(Kind kind) : kind_(kind) { mImpl = this; }

    bool isConstant() const override { return kind_ == Kind::kConstant; }
    // As TensorRT's: the smallest integer where the value is not known yet.
    int64_t getConstantValue() const override { return isConstant() ? value_ : INT64_MIN; }
    bool isSizeTensor() const override { return false; }

    int64_t apply(int64_t a, int64_t b) const {
        switch (op_) {
            case DimensionOperation::kSUM:
                return a + b;
            case DimensionOperation::kPROD:
                return a * b;
            case DimensionOperation::kMAX:
                return a > b ? a : b;
            case DimensionOperation::kMIN:
                return a < b ? a : b;
            case DimensionOperation::kSUB:
                return a - b;
            case DimensionOperation::kEQUAL:
                return a == b;
            case DimensionOperation::kLESS:
                return a < b;
            case DimensionOperation::kFLOOR_DIV:
                return a / b;
            case DimensionOperation::kCEIL_DIV:
                return (a + b - 1) / b;
        }
        throw std::logic_error("unknown dimension operation");
    }

    Kind kind_;
    int64_t value_ = 0;
    int32_t input_ = 0;
    int32_t dimension_ = 0;
    DimensionOperation op_ = DimensionOperation::kSUM;
    DimensionExpr const* first_ = nullptr;
    DimensionExpr const* second_ = nullptr;
};

// Owns the expressions it makes.
class ExprBuilder final : public nvinfer1::IExprBuilder, private nvinfer1::apiv::VExprBuilder {
 public:
    ExprBuilder() { mImpl = this; }

    DimensionExpr const* input(int32_t input, int32_t dimension) {
        return keep(DimensionExpr::input(input, dimension));
    }
    DimensionExpr const* known(int64_t value) { return keep(DimensionExpr::constant(value)); }

 private:
    nvinfer1::IDimensionExpr const* constant(int64_t value) override { return known(value); }
    nvinfer1::IDimensionExpr const* operation(DimensionOperation op, nvinfer1::IDimensionExpr const& first,
                                              nvinfer1::IDimensionExpr const& second) override {
        return keep(DimensionExpr::operation(op, static_cast<DimensionExpr const&>(first),
                                             static_cast<DimensionExpr const&>(second)));
    }
    nvinfer1::IDimensionExpr const* declareSizeTensor(int32_t, nvinfer1::IDimensionExpr const&,
                                                      nvinfer1::IDimensionExpr const&) override {
        return nullptr;  // data-dependent shapes: none of the ops has one
    }

    DimensionExpr const* keep(std::unique_ptr<DimensionExpr> expr) {
        exprs_.push_back(std::move(expr));
        return exprs_.back().get();
    }

    std::vector<std::unique_ptr<DimensionExpr>> exprs_;
};

}  // namespace plugin_host
